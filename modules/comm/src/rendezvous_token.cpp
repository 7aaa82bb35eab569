#include "rendezvous_token.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace ebb::comm {
namespace {

constexpr std::size_t kBlock = 64; // of SHA-1, bytes

std::string sha1_hex(const std::string& text) {
  return c10::sha1(text).str();
}

std::string padded(std::string key, char pad) {
  key.resize(kBlock, '\0');
  for (char& c : key) {
    c = static_cast<char>(c ^ pad);
  }
  return key;
}

} // namespace

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const auto got = ::getrandom(bytes.data() + filled, bytes.size() - filled, 0);
    TORCH_CHECK(got >= 0 || errno == EINTR, "[random_token] the kernel gives no random bytes: ", std::strerror(errno));
    filled += got > 0 ? static_cast<std::size_t>(got) : 0;
  }
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string keyed_hash(const std::string& key, const std::string& text) {
  const std::string short_key = key.size() > kBlock ? sha1_hex(key) : key;
  return sha1_hex(padded(short_key, 0x5c) + sha1_hex(padded(short_key, 0x36) + text));
}

} // namespace ebb::comm
