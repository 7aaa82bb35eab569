#include "train_state.h"

#include "ebb/base/error.h"

#include <torch/torch.h>

#include <mutex>

namespace ebb::train {
namespace {

std::vector<at::Generator> generators_for(c10::Device device) {
  std::vector<at::Generator> generators{at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) {
    generators.push_back(at::globalContext().defaultGenerator(device));
  }
  return generators;
}

void check_same_tensors(const char* what, const std::vector<Named>& expected, const std::vector<Named>& found) {
  for (std::size_t i = 0; i < std::max(expected.size(), found.size()); ++i) {
    const auto text = [i](const std::vector<Named>& tensors) {
      return i < tensors.size()
                 ? c10::str(tensors[i].first, " ", tensors[i].second.sizes(), " ", tensors[i].second.dtype())
                 : std::string("nothing");
    };
    if (text(expected) != text(found)) {
      EBB_THROW(
          IncompatibleStateError, "[TrainJob::resume] ", what, " ", i, ": the job has ", text(expected), ", the state ",
          text(found), "; resume with the model that was paused");
    }
  }
}

} // namespace

std::vector<std::pair<std::string, std::string>> describe(const TrainSetup& setup) {
  auto values = option_values(setup.options);
  values.emplace_back("context", std::to_string(setup.corpus->options().context));
  values.emplace_back("training windows", std::to_string(setup.corpus->num_windows(data::Split::kTrain)));
  values.emplace_back("world size", std::to_string(setup.world->size()));
  values.emplace_back("rank", std::to_string(setup.world->rank()));
  return values;
}

void check_compatible(const TrainState& state, const TrainSetup& setup) {
  const auto expected = describe(setup);
  TORCH_INTERNAL_ASSERT(expected.size() == state.made_by.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].second != state.made_by[i].second) {
      EBB_THROW(
          IncompatibleStateError, "[TrainJob::resume] ", expected[i].first, ": the job has ", expected[i].second,
          ", the state ", state.made_by[i].second, "; resume with the options, data and ranks of the paused job");
    }
  }
  check_same_tensors("parameter", setup.model.parameters->named(), state.parameters);
  check_same_tensors("buffer", setup.model.buffers, state.buffers);
}

std::vector<Named> copies_of(const std::vector<Named>& tensors) {
  std::vector<Named> copies;
  copies.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    copies.emplace_back(name, tensor.detach().clone());
  }
  return copies;
}

void copy_into(const std::vector<Named>& to, const std::vector<Named>& from) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < to.size(); ++i) {
    auto target = to[i].second;
    target.copy_(from[i].second);
  }
}

std::vector<at::Tensor> generator_states(c10::Device device) {
  std::vector<at::Tensor> states;
  for (auto& generator : generators_for(device)) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

void set_generator_states(c10::Device device, const std::vector<at::Tensor>& states) {
  auto generators = generators_for(device);
  for (std::size_t i = 0; i < generators.size(); ++i) {
    const std::lock_guard lock(generators[i].mutex());
    generators[i].set_state(states[i]);
  }
}

} // namespace ebb::train
