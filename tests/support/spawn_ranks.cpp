#include "support/spawn_ranks.h"

#include "support/delayed_communicator.h"

#include "ebb/base/log.h"

#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace ebb::test {

void spawn_ranks(
    int size, const std::function<void(const std::shared_ptr<comm::Communicator>&)>& body,
    const comm::GroupOptions& options) {
  spawn_ranks(size, body, [&](int /*rank*/) { return options; });
}

void spawn_ranks(
    int size, const std::function<void(const std::shared_ptr<comm::Communicator>&)>& body,
    const std::function<comm::GroupOptions(int rank)>& options_of) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  threads.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      log::set_rank(rank);
      std::shared_ptr<comm::Communicator> group;
      try {
        group = size == 1 ? comm::single() : comm::connect(store, rank, size, options_of(rank));
        if (const int most_us = asked_delay_us(); most_us > 0) {
          group = delayed(group, most_us);
        }
        body(group);
      } catch (...) {
        {
          const std::lock_guard lock(mutex);
          if (!first_error) {
            first_error = std::current_exception();
          }
        }
        if (group) {
          group->abort();
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  if (first_error) {
    std::rethrow_exception(first_error);
  }
}

} // namespace ebb::test
