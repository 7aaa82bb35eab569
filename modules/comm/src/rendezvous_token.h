#pragma once

#include <string>

namespace ebb::comm {

/// 128 bits from the kernel's generator, as 32 hexadecimal digits.
std::string random_token();

/// HMAC-SHA-1 of `text` under `key`, 40 hexadecimal digits. (RFC 2104, except that the inner digest enters the outer
/// one in hexadecimal.)
std::string keyed_hash(const std::string& key, const std::string& text);

} // namespace ebb::comm
