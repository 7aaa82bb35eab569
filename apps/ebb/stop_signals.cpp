#include "stop_signals.h"

#include "ebb/train/train_job.h"

#include <atomic>
#include <csignal>

namespace ebb::app {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGINT, SIGHUP};

// A handler reaches nothing but globals. Both are lock-free, as a handler needs.
std::atomic<train::TrainJob*> running_job{nullptr};
std::atomic<int> received_signal{0};

void on_signal(int signal) {
  received_signal.store(signal, std::memory_order_relaxed);
  if (auto* job = running_job.load(std::memory_order_relaxed)) {
    job->request_stop();
  }
}

} // namespace

StopSignals::StopSignals(train::TrainJob& job) {
  received_signal = 0;
  running_job = &job;
  for (const int signal : kSignals) {
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    ::sigaction(signal, &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (const int signal : kSignals) {
    std::signal(signal, SIG_DFL);
  }
  running_job = nullptr;
}

int StopSignals::received() const {
  return received_signal;
}

} // namespace ebb::app
