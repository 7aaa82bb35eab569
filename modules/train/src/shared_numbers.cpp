#include "shared_numbers.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <string>

namespace ebb::train {

std::vector<std::vector<double>> shared_numbers(comm::Communicator& world, const std::vector<double>& mine) {
  const auto bytes = mine.size() * sizeof(double);
  const auto texts = world.exchange(std::string(reinterpret_cast<const char*>(mine.data()), bytes));
  std::vector<std::vector<double>> all;
  all.reserve(texts.size());
  for (const auto& text : texts) {
    TORCH_INTERNAL_ASSERT(text.size() == bytes, "a rank shared ", text.size(), " bytes, this one ", bytes);
    auto& numbers = all.emplace_back(mine.size());
    std::memcpy(numbers.data(), text.data(), bytes);
  }
  return all;
}

} // namespace ebb::train
