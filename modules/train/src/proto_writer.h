#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace ebb::train {

/// Writes one protocol buffer message field by field. LibTorch exports the symbols of its own protobuf, which would
/// clash with another copy of that library in the program; the few messages of an event file need none.
class ProtoWriter {
 public:
  ProtoWriter& varint(int field, std::uint64_t value) {
    tag(field, 0);
    put_varint(value);
    return *this;
  }
  ProtoWriter& fixed(int field, double value) {
    tag(field, 1);
    put_raw(value);
    return *this;
  }
  ProtoWriter& fixed(int field, float value) {
    tag(field, 5);
    put_raw(value);
    return *this;
  }
  ProtoWriter& bytes(int field, std::string_view value) {
    tag(field, 2);
    put_varint(value.size());
    bytes_.append(value);
    return *this;
  }
  ProtoWriter& message(int field, const ProtoWriter& value) {
    return bytes(field, value.bytes_);
  }
  const std::string& str() const {
    return bytes_;
  }

 private:
  void tag(int field, int wire_type) {
    put_varint(static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint64_t>(wire_type));
  }
  void put_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      bytes_ += static_cast<char>(value | 0x80);
    }
    bytes_ += static_cast<char>(value);
  }
  template <class T>
  void put_raw(T value) { // little endian, as every machine that LibTorch's wheels are made for
    char raw[sizeof(T)];
    std::memcpy(raw, &value, sizeof(T));
    bytes_.append(raw, sizeof(T));
  }

  std::string bytes_;
};

} // namespace ebb::train
