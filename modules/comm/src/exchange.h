#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace ebb::comm {

/// Memory of an exchange; shared, since a failed operation may still write to it when its caller is gone.
using Bytes = std::shared_ptr<std::vector<char>>;

/// Texts of different lengths by two gathers of equal ones: first the lengths, then the texts padded to the longest.
/// `gather(output, input)` is a blocking all-gather.
template <class Gather>
std::vector<std::string> exchange_by(const Gather& gather, const std::string& mine, int size) {
  const auto length = std::make_shared<std::vector<char>>(sizeof(std::int64_t));
  const auto lengths = std::make_shared<std::vector<char>>(sizeof(std::int64_t) * size);
  const auto own_length = static_cast<std::int64_t>(mine.size());
  std::memcpy(length->data(), &own_length, sizeof(own_length));
  gather(lengths, length);
  std::vector<std::int64_t> by_rank(size);
  std::memcpy(by_rank.data(), lengths->data(), lengths->size());
  std::int64_t longest = 0;
  for (const auto bytes : by_rank) {
    longest = bytes > longest ? bytes : longest;
  }
  const auto text = std::make_shared<std::vector<char>>(mine.begin(), mine.end());
  text->resize(longest);
  const auto all = std::make_shared<std::vector<char>>(longest * size);
  gather(all, text);
  std::vector<std::string> result;
  for (int rank = 0; rank < size; ++rank) {
    result.emplace_back(all->data() + rank * longest, by_rank[rank]);
  }
  return result;
}

} // namespace ebb::comm
