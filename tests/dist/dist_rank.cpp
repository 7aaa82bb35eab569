// A rank, or a launcher of ranks, for the tests of this folder.
//
//   dist_rank launch NPROC LEAVE_MS GRACE_MS MODE [ARGUMENT...]   starts NPROC times: dist_rank MODE [ARGUMENT...]
//   dist_rank MODE [ARGUMENT...]                                  one rank, its place taken from the environment
//
// Modes, each after having joined the group:
//   steps COUNT PAUSE_MS       all-reduces COUNT times with a pause between, and prints the sum
//   throw RANK STEP            as steps, but RANK throws at STEP
//   return RANK STEP           as steps, but RANK ends well at STEP
//   busy RANK SECONDS          RANK computes for SECONDS between two all-reduces
//   collectives COUNT          one of each on COUNT floats a rank; prints the algorithm and whether the bits are right
//   signals                    prints the signals that arrive; ends with code 7 at the first SIGTERM
// EBB_DIST_TRANSPORT=sockets keeps ranks from reading each other's memory; =hosts puts the second half of them on another
// host, by name.
// Mode without a group:
//   early RANK CODE            RANK ends with CODE before it joins, the others join

#include "ebb/base/error.h"
#include "ebb/base/log.h"
#include "ebb/comm/init.h"
#include "ebb/comm/launch.h"

#include <torch/torch.h>

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace ebb;

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void sleep_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

void steps(comm::Communicator& group, int count, int pause_ms, int special_rank, int special_step, bool throws) {
  const auto tensor = torch::zeros({1000});
  for (int step = 0; step < count; ++step) {
    group.set_step(step);
    if (group.rank() == special_rank && step == special_step) {
      if (throws) {
        throw std::runtime_error("the loss is not finite");
      }
      return;
    }
    tensor.fill_(group.rank() + 1);
    group.all_reduce(tensor, comm::ReduceOp::kSum, 1.0, "test")->wait();
    if (step == 0) {
      say("rank " + std::to_string(group.rank()) + " is stepping");
    }
    sleep_ms(pause_ms);
  }
  say("rank " + std::to_string(group.rank()) + " done, sum " + std::to_string(tensor[999].item<int>()));
}

void busy(comm::Communicator& group, int rank, double seconds) {
  const auto tensor = torch::ones({10});
  group.all_reduce(tensor, comm::ReduceOp::kSum, 1.0, "before")->wait();
  if (group.rank() == rank) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    volatile double work = 1;
    while (std::chrono::steady_clock::now() < end) {
      work = work * 1.0000001;
    }
  }
  group.all_reduce(tensor, comm::ReduceOp::kSum, 1.0, "after")->wait();
  say("rank " + std::to_string(group.rank()) + " done, sum " + std::to_string(tensor[0].item<int>()));
}

at::Tensor values(int rank, int count, int salt) {
  const auto place = at::remainder(at::arange(count, at::kInt) * (31 + 2 * rank) + 17 * salt, 20011);
  return (place - 10007).to(at::kFloat) / 769; // Sums of these are rounded, so their order shows in the bits.
}

void collectives(comm::Communicator& group, int count) {
  const int rank = group.rank();
  const int size = group.size();
  const auto summed = [&](int length, int salt) {
    auto sum = values(0, length, salt);
    for (int source = 1; source < size; ++source) {
      sum = sum + values(source, length, salt);
    }
    return sum / size;
  };
  const auto report = [&](const char* what, bool right) {
    say("rank " + std::to_string(rank) + " " + what + (right ? " has the right bits" : " is WRONG"));
  };
  say("rank " + std::to_string(rank) + " gathers by " + group.capabilities().all_gather);
  say("rank " + std::to_string(rank) + " sums by " + group.capabilities().reduce_scatter);
  const auto gathered = at::empty({size * count});
  group.all_gather(gathered, values(rank, count, 1), "gather")->release();
  std::vector<at::Tensor> shards;
  for (int source = 0; source < size; ++source) {
    shards.push_back(values(source, count, 1));
  }
  report("all_gather", gathered.equal(at::cat(shards)));
  const auto part = at::empty({count});
  group.reduce_scatter(part, values(rank, size * count, 2), size, "scatter")->release();
  report("reduce_scatter", part.equal(summed(size * count, 2).slice(0, rank * count, (rank + 1) * count)));
  const auto whole = values(rank, count, 3);
  group.all_reduce(whole, comm::ReduceOp::kSum, size, "reduce")->release();
  report("all_reduce", whole.equal(summed(count, 3)));
  const auto spread = values(rank, count, 4);
  group.broadcast(spread, 0, "broadcast")->release();
  report("broadcast", spread.equal(values(0, count, 4)));
  say("rank " + std::to_string(rank) + " across " + std::to_string(group.traffic().total_bytes_across_hosts()));
  group.barrier();
}

int signals(comm::Communicator& group, const sigset_t& set) {
  group.barrier();
  say("rank " + std::to_string(group.rank()) + " is listening");
  for (;;) {
    int signal = 0;
    ::sigwait(&set, &signal);
    say("rank " + std::to_string(group.rank()) + " got signal " + std::to_string(signal));
    if (signal == SIGTERM) {
      return 7;
    }
  }
}

int run(const std::vector<std::string>& args) {
  const auto number = [&](std::size_t i) { return std::stoi(args.at(i)); };
  const auto& mode = args.at(0);
  const auto environment = comm::launch_environment();
  say("rank " + std::to_string(environment.rank) + " pid " + std::to_string(::getpid()));
  if (mode == "early" && environment.rank == number(1)) {
    return number(2);
  }
  sigset_t waited_for;
  ::sigemptyset(&waited_for);
  if (mode == "signals") {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) {
      ::sigaddset(&waited_for, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &waited_for, nullptr); // before any thread starts
  }
  const char* named = std::getenv("EBB_DIST_TRANSPORT");
  const std::string transport = named ? named : "";
  const bool second_half = 2 * environment.rank >= environment.world_size;
  const auto group = comm::init(
      environment, {.host = transport == "hosts" ? (second_half ? "second" : "first") : "",
                    .same_host_reads = transport != "sockets"});
  say("rank " + std::to_string(group->rank()) + " of " + std::to_string(group->size()) + " joined");
  if (mode == "steps") {
    steps(*group, number(1), number(2), -1, -1, false);
  } else if (mode == "throw" || mode == "return") {
    steps(*group, 1000000, 1, number(1), number(2), mode == "throw");
  } else if (mode == "busy") {
    busy(*group, number(1), std::stod(args.at(2)));
  } else if (mode == "collectives") {
    collectives(*group, number(1));
  } else if (mode == "signals") {
    return signals(*group, waited_for);
  } else if (mode != "early") {
    throw std::invalid_argument("unknown mode " + mode);
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL); // nothing is left behind when a test is killed
  std::vector<std::string> args(argv + 1, argv + argc);
  at::set_num_threads(1);
  try {
    if (args.at(0) == "launch") {
      std::vector<std::string> rank_argv(args.begin() + 4, args.end());
      rank_argv.insert(rank_argv.begin(), argv[0]);
      return comm::launch_local_ranks(
          std::stoi(args.at(1)), rank_argv,
          {.leave = std::chrono::milliseconds(std::stoi(args.at(2))),
           .grace = std::chrono::milliseconds(std::stoi(args.at(3)))});
    }
    return run(args);
  } catch (const RankLostError& error) {
    say("rank " + std::to_string(log::rank()) + " RankLostError " + std::to_string(error.rank()) + ": " +
        message_of(error));
    return static_cast<int>(exit_code_of(error));
  } catch (const std::exception& error) {
    const char* type = dynamic_cast<const TimeoutError*>(&error)      ? "TimeoutError"
                       : dynamic_cast<const c10::ValueError*>(&error) ? "ValueError"
                                                                      : "exception";
    say("rank " + std::to_string(log::rank()) + " " + type + ": " + message_of(error));
    return static_cast<int>(exit_code_of(error));
  }
}
