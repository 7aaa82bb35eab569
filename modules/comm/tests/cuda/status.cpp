// Starts with or without a GPU and driver, and says what there is.
#include "connect_nccl.h"

#include <iostream>

int main() {
  std::cout << ebb::comm::cuda_status().text << '\n';
  return ebb::comm::cuda_status().built ? 0 : 1;
}
