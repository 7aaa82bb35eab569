#include <gtest/gtest.h>

#include <torch/torch.h>

#include <csignal>

// One thread a rank, so that tests that compare bits do not depend on the number of cores; SIGPIPE off, as in every rank.
int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::signal(SIGPIPE, SIG_IGN);
  at::set_num_threads(1);
  return RUN_ALL_TESTS();
}
