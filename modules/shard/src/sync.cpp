#include "sync.h"

#include "ebb/base/error.h"

#include <torch/torch.h>

#include <map>
#include <sstream>
#include <tuple>
#include <unordered_set>

namespace ebb::shard {
namespace {

std::vector<std::string> describe(const ModuleTree& tree, const std::string& settings) {
  std::vector<std::string> lines{"options: " + settings};
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      lines.push_back(c10::str(
          "parameter '", name, "' ", tensor.sizes(), " ", tensor.dtype(),
          tensor.is_contiguous() ? "" : c10::str(" with strides ", tensor.strides()),
          tensor.requires_grad() ? "" : ", frozen"));
    }
  }
  for (const auto& [name, tensor] : tree.buffers) {
    lines.push_back(c10::str(
        "buffer '", name, "' ", tensor.defined() ? c10::str(tensor.sizes(), " ", tensor.dtype()) : "undefined"));
  }
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) {
    text += line + "\n";
  }
  return text;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}

} // namespace

void check_same_model(
    std::string_view function, const ModuleTree& tree, const std::string& settings, const std::string& units,
    comm::Communicator& group) {
  if (group.size() == 1) {
    return;
  }
  auto lines = describe(tree, settings);
  lines.push_back("units:" + units);
  const auto text = joined(lines);
  // The digest first: a large model's description is sent only when it is needed.
  const auto digests = group.exchange(std::to_string(std::hash<std::string>{}(text)));
  bool same = true;
  for (const auto& digest : digests) {
    same = same && digest == digests.front();
  }
  if (same) {
    return;
  }
  constexpr std::size_t kMostText = 900'000; // exchange() takes up to 1 MB
  const auto all = group.exchange(text.substr(0, kMostText));
  const auto first = split(all.front());
  for (int rank = 1; rank < group.size(); ++rank) {
    const auto theirs = split(all[rank]);
    for (std::size_t i = 0; i < std::max(first.size(), theirs.size()); ++i) {
      const auto on0 = i < first.size() ? first[i] : std::string("nothing more");
      const auto here = i < theirs.size() ? theirs[i] : std::string("nothing more");
      if (on0 != here) {
        EBB_THROW(
            IncompatibleStateError, "[", function, "] the ranks' models differ: rank 0 has ", on0, ", rank ", rank,
            " has ", here, "; build the same model with the same options on every rank");
      }
    }
  }
  EBB_THROW(
      IncompatibleStateError, "[", function, "] the ranks' models differ beyond their first ", first.size(),
      " parameters");
}

void broadcast_from_rank0(const ModuleTree& tree, comm::Communicator& group) {
  if (group.size() == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> done;
  // Released, one behind: else the group would keep what peers may still be reading, beside the shards that replace it.
  std::unique_ptr<comm::Work> last;
  const auto broadcast = [&](const std::string& name, const at::Tensor& tensor) {
    auto work = group.broadcast(tensor, 0, name);
    work->wait();
    if (last) {
      last->release();
    }
    last = std::move(work);
  };
  const auto send = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.numel() == 0 || !done.insert(tensor.unsafeGetTensorImpl()).second) {
      return;
    }
    const bool elsewhere = tensor.is_cpu() && !group.capabilities().cpu; // on its way to ShardOptions::device
    if (tensor.is_contiguous() && !elsewhere) {
      broadcast(name, tensor.detach());
    } else {
      auto copy = (elsewhere ? tensor.detach().to(at::kCUDA) : tensor.detach()).contiguous();
      broadcast(name, copy);
      tensor.detach().copy_(copy);
    }
  };
  for (const auto& node : tree.nodes) {
    for (const auto& [name, tensor] : node.parameters) {
      send(name, tensor);
    }
  }
  for (const auto& [name, tensor] : tree.buffers) {
    send(name, tensor);
  }
  if (last) {
    last->release();
  }
}

void broadcast_buffers_from_rank0(
    const std::vector<std::pair<std::string, at::Tensor>>& buffers, comm::Communicator& group) {
  if (group.size() == 1) {
    return;
  }
  const at::NoGradGuard no_grad;
  std::map<std::pair<at::ScalarType, c10::Device>, std::vector<at::Tensor>, decltype([](const auto& a, const auto& b) {
             return std::make_tuple(a.first, a.second.type(), a.second.index()) <
                    std::make_tuple(b.first, b.second.type(), b.second.index());
           })>
      alike;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, tensor] : buffers) {
    if (tensor.defined() && tensor.numel() > 0 && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      alike[{tensor.scalar_type(), tensor.device()}].push_back(tensor);
    }
  }
  for (const auto& [kind, tensors] : alike) {
    std::vector<at::Tensor> flat;
    for (const auto& tensor : tensors) {
      flat.push_back(tensor.detach().reshape({-1}));
    }
    const auto all = at::cat(flat);
    group.broadcast(all, 0, "(buffers)")->wait();
    std::int64_t begin = 0;
    for (const auto& tensor : tensors) {
      // Its own version counter: a graph that is still to run backward may have saved the buffer.
      auto target = tensor.variable_data();
      target.copy_(all.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  }
}

void all_reduce_small(comm::Communicator& group, at::Tensor& tensor, comm::ReduceOp op, std::string_view unit) {
  const bool elsewhere = tensor.is_cpu() && !group.capabilities().cpu;
  auto served = elsewhere ? tensor.to(at::kCUDA) : tensor;
  group.all_reduce(served, op, 1, unit)->wait();
  tensor = elsewhere ? served.cpu() : served;
}

} // namespace ebb::shard
