#include "ebb/train/event_file.h"
#include "ebb/train/tensorboard_observer.h"

#include "crc32c.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

namespace ebb::train {
namespace {

/// The CRC bit by bit, without the table under test.
std::uint32_t slow_crc32c(std::string_view bytes) {
  std::uint32_t value = 0xffffffff;
  for (const unsigned char byte : bytes) {
    value ^= byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = value & 1 ? (value >> 1) ^ 0x82f63b78 : value >> 1;
    }
  }
  return ~value;
}

TEST(Crc32c, EqualsThePublishedValues) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u); // RFC 3720, appendix B.4, and the check value of the CRC catalogue
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("The quick brown fox"), slow_crc32c("The quick brown fox"));
}

template <class T>
T take(std::string_view& from) {
  T value{};
  if (from.size() < sizeof(T)) {
    ADD_FAILURE() << "the file ends too early";
    from = {};
    return value;
  }
  std::memcpy(&value, from.data(), sizeof(T));
  from.remove_prefix(sizeof(T));
  return value;
}

/// The records of a TFRecord file, with both checksums checked.
std::vector<std::string> records_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string all(std::istreambuf_iterator<char>(in), {});
  std::string_view rest = all;
  const auto unmask = [](std::uint32_t masked) { return std::rotl(masked - 0xa282ead8u, 15); };
  std::vector<std::string> records;
  while (!rest.empty()) {
    const auto length_bytes = rest.substr(0, 8);
    const auto length = take<std::uint64_t>(rest);
    EXPECT_EQ(unmask(take<std::uint32_t>(rest)), slow_crc32c(length_bytes));
    if (length > rest.size()) {
      ADD_FAILURE() << "a record is longer than the file";
      break;
    }
    records.emplace_back(rest.substr(0, length));
    rest.remove_prefix(length);
    EXPECT_EQ(unmask(take<std::uint32_t>(rest)), slow_crc32c(records.back()));
  }
  return records;
}

std::uint64_t take_varint(std::string_view& from) {
  std::uint64_t value = 0;
  for (int shift = 0; !from.empty(); shift += 7) {
    const auto byte = static_cast<std::uint8_t>(from.front());
    from.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) {
      break;
    }
  }
  return value;
}

/// Field number to the raw values of a protocol buffer message.
std::multimap<int, std::string> fields_of(std::string_view message) {
  std::multimap<int, std::string> fields;
  while (!message.empty()) {
    const auto tag = take_varint(message);
    std::size_t size = 0;
    switch (tag & 7) {
      case 0:
        fields.emplace(tag >> 3, std::to_string(take_varint(message)));
        continue;
      case 1:
        size = 8;
        break;
      case 2:
        size = take_varint(message);
        break;
      case 5:
        size = 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << (tag & 7);
        return fields;
    }
    fields.emplace(tag >> 3, message.substr(0, size));
    message.remove_prefix(size);
  }
  return fields;
}

std::string only(const std::multimap<int, std::string>& fields, int number) {
  EXPECT_EQ(fields.count(number), 1u) << "field " << number;
  const auto found = fields.find(number);
  return found == fields.end() ? "" : found->second;
}

template <class T>
T number(const std::string& raw) {
  std::string_view view = raw;
  return take<T>(view);
}

TEST(EventFile, HoldsItsVersionThenScalarsWithStepAndTime) {
  const test::TemporaryFolder folder;
  ScriptedClock clock;
  clock.advance(std::chrono::milliseconds(1500));
  EventFile file(folder.path() / "run", clock);
  EXPECT_NE(file.path().filename().string().find("tfevents"), std::string::npos);
  clock.advance(std::chrono::seconds(1));
  ASSERT_TRUE(file.scalars(300, {{"train/loss", 1.25}, {"train/lr", 0.5}}));

  const auto records = records_of(file.path());
  ASSERT_EQ(records.size(), 2u);
  const auto first = fields_of(records[0]);
  EXPECT_EQ(only(first, 3), "brain.Event:2");
  EXPECT_EQ(number<double>(only(first, 1)), 1.5);

  const auto event = fields_of(records[1]);
  EXPECT_EQ(number<double>(only(event, 1)), 2.5);
  EXPECT_EQ(only(event, 2), "300");
  const auto summary = fields_of(only(event, 5));
  std::map<std::string, float> values;
  for (const auto& [field, raw] : summary) {
    EXPECT_EQ(field, 1);
    const auto value = fields_of(raw);
    values[only(value, 1)] = number<float>(only(value, 2));
  }
  EXPECT_EQ(values, (std::map<std::string, float>{{"train/loss", 1.25f}, {"train/lr", 0.5f}}));
}

TEST(EventFile, HoldsTextAsAStringTensorForTheTextPlugin) {
  const test::TemporaryFolder folder;
  EventFile file(folder.path());
  ASSERT_TRUE(file.text(7, "sample", "It is a truth"));
  const auto records = records_of(file.path());
  ASSERT_EQ(records.size(), 2u);
  const auto value = fields_of(only(fields_of(only(fields_of(records[1]), 5)), 1));
  EXPECT_EQ(only(value, 1), "sample");
  const auto tensor = fields_of(only(value, 8));
  EXPECT_EQ(only(tensor, 1), "7"); // DT_STRING
  EXPECT_EQ(only(fields_of(only(fields_of(only(tensor, 2)), 2)), 1), "1");
  EXPECT_EQ(only(tensor, 8), "It is a truth");
  EXPECT_EQ(only(fields_of(only(fields_of(only(value, 9)), 1)), 1), "text");
}

TEST(EventFile, NamesAFolderThatCannotBeWritten) {
  const test::TemporaryFolder folder;
  const auto file = folder.write("file", "not a folder");
  EXPECT_THROW(EventFile(std::filesystem::path(file) / "run"), c10::ValueError);
}

TEST(TensorBoardObserver, GroupsTrainingMetricsAndMakesTextHarmless) {
  const test::TemporaryFolder folder;
  TensorBoardObserver observer(folder.path());
  StepInfo step;
  step.step = 1;
  step.metrics = {{"loss", 2.0}};
  observer.on_step(step);
  observer.on_metrics(1, {{"eval/loss", 3.0}});
  observer.on_text(1, "sample", "a\x1b[2J\xff");
  std::vector<std::string> records;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    records = records_of(entry.path());
  }
  ASSERT_EQ(records.size(), 4u);
  const auto value = [&](int i) { return fields_of(only(fields_of(only(fields_of(records[i]), 5)), 1)); };
  EXPECT_EQ(only(value(1), 1), "train/loss");
  EXPECT_EQ(only(value(2), 1), "eval/loss");
  EXPECT_EQ(only(fields_of(only(value(3), 8)), 8), "a?[2J?");
}

} // namespace
} // namespace ebb::train
