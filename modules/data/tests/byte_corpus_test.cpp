#include "ebb/data/byte_corpus.h"

#include "ebb/base/error.h"
#include "support/temporary_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <set>

namespace ebb::data {
namespace {

using test::TemporaryFolder;
using ::testing::HasSubstr;

std::string numbered(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    text += static_cast<char>('a' + i % 26);
  }
  return text;
}

template <class Exception>
std::string message_thrown_by(const ByteCorpusOptions& options) {
  try {
    ByteCorpus corpus(options);
  } catch (const Exception& error) {
    return message_of(error);
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

std::string text_of(std::span<const std::uint8_t> window) {
  return {window.begin(), window.end()};
}

TEST(ByteCorpus, KeepsTheLastTenthOfEachDocumentForValidation) {
  const TemporaryFolder folder;
  const ByteCorpus corpus({
      .files = {folder.write("a.txt", "ONE\n" + numbered(196) + "\nTWO\n" + numbered(95))},
      .document_start = {"ONE", "TWO"},
      .context = 4,
  });
  ASSERT_EQ(corpus.documents().size(), 2u);
  const auto& one = corpus.documents()[0];
  EXPECT_EQ(one.first_line, "ONE");
  EXPECT_EQ(one.begin, 0);
  EXPECT_EQ(one.end, 201);
  EXPECT_EQ(one.end - one.split, 20);
  const auto& two = corpus.documents()[1];
  EXPECT_EQ(two.first_line, "TWO");
  EXPECT_EQ(two.begin, 201);
  EXPECT_EQ(two.end, 300);
  EXPECT_EQ(two.end - two.split, 9);
  EXPECT_EQ(corpus.num_bytes(Split::kTrain), 181 + 90);
  EXPECT_EQ(corpus.num_bytes(Split::kValidation), 20 + 9);
  // (bytes - 1) / 4 windows a part.
  EXPECT_EQ(corpus.num_windows(Split::kTrain), 45 + 22);
  EXPECT_EQ(corpus.num_windows(Split::kValidation), 4 + 2);
}

TEST(ByteCorpus, CutsWindowsThatOverlapByTheirTargetAndCrossNoBorder) {
  const TemporaryFolder folder;
  const ByteCorpus corpus({
      .files = {folder.write("a.txt", "0123456789abcdefghij"), folder.write("b.txt", "ABCDEFGHIJ")},
      .context = 4,
      .validation_fraction = 0.5,
  });
  ASSERT_EQ(corpus.num_windows(Split::kTrain), 3);
  EXPECT_EQ(text_of(corpus.window(Split::kTrain, 0)), "01234");
  EXPECT_EQ(text_of(corpus.window(Split::kTrain, 1)), "45678");
  EXPECT_EQ(text_of(corpus.window(Split::kTrain, 2)), "ABCDE");
  ASSERT_EQ(corpus.num_windows(Split::kValidation), 3);
  EXPECT_EQ(text_of(corpus.window(Split::kValidation, 1)), "efghi");
  EXPECT_EQ(text_of(corpus.window(Split::kValidation, 2)), "FGHIJ");
  EXPECT_THROW(corpus.window(Split::kTrain, 3), c10::ValueError);
  EXPECT_THROW(corpus.window(Split::kTrain, -1), c10::ValueError);
}

TEST(ByteCorpus, BeginsADocumentOnlyAtAWholeLine) {
  const TemporaryFolder folder;
  const ByteCorpus corpus({
      .files = {folder.write("a.txt", "before the first\nEMMA said\n say EMMA\r\n  EMMA \r\nafter\nEMMA")},
      .document_start = {"EMMA"},
      .context = 2,
  });
  ASSERT_EQ(corpus.documents().size(), 3u);
  EXPECT_EQ(corpus.documents()[0].first_line, "before the first");
  EXPECT_EQ(corpus.text(corpus.documents()[1]), "  EMMA \r\nafter\n");
  EXPECT_EQ(corpus.text(corpus.documents()[2]), "EMMA");
}

TEST(ByteCorpus, NamesAStartLineThatNeverOccurs) {
  const TemporaryFolder folder;
  const auto message = message_thrown_by<c10::ValueError>(
      {.files = {folder.write("a.txt", "ONE\n" + numbered(200))}, .document_start = {"ONE", "TWO"}, .context = 4});
  EXPECT_THAT(message, HasSubstr("'TWO'"));
}

TEST(ByteCorpus, NamesAFileThatIsEmptyOrShorterThanAWindow) {
  const TemporaryFolder folder;
  const auto good = folder.write("good.txt", numbered(200));
  EXPECT_THAT(
      message_thrown_by<FormatError>({.files = {good, folder.write("empty.txt", "")}}),
      ::testing::AllOf(HasSubstr("empty.txt"), HasSubstr("is empty")));
  EXPECT_THAT(
      message_thrown_by<FormatError>({.files = {good, folder.write("short.txt", numbered(64))}, .context = 64}),
      ::testing::AllOf(HasSubstr("short.txt"), HasSubstr("holds 64 bytes"), HasSubstr("needs 65")));
  // Long enough for one window, but not once the validation part is taken off.
  EXPECT_THAT(
      message_thrown_by<FormatError>({.files = {folder.write("cut.txt", numbered(65))}, .context = 64}),
      ::testing::AllOf(HasSubstr("cut.txt"), HasSubstr("65 bytes")));
}

TEST(ByteCorpus, RefusesWhatIsNotAReadableFile) {
  const TemporaryFolder folder;
  const auto missing = (folder.path() / "missing.txt").string();
  EXPECT_THAT(message_thrown_by<c10::ValueError>({.files = {missing}}), HasSubstr("missing.txt"));
  EXPECT_THAT(message_thrown_by<c10::ValueError>({.files = {folder.path().string()}}), HasSubstr("not a regular file"));
  const auto pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(message_thrown_by<c10::ValueError>({.files = {pipe}}), HasSubstr("not a regular file"));
}

TEST(ByteCorpus, RefusesOptionsOutOfRange) {
  const TemporaryFolder folder;
  const auto file = folder.write("a.txt", numbered(200));
  EXPECT_THAT(message_thrown_by<c10::ValueError>({}), HasSubstr("at least one text file"));
  EXPECT_THAT(message_thrown_by<c10::ValueError>({.files = {file}, .context = 0}), HasSubstr("context"));
  EXPECT_THAT(
      message_thrown_by<c10::ValueError>({.files = {file}, .validation_fraction = 1.0}),
      HasSubstr("validation_fraction"));
  EXPECT_THAT(
      message_thrown_by<c10::ValueError>({.files = {file}, .document_start = {" "}}), HasSubstr("document_start"));
}

TEST(KnownWords, CountsWholeWordsWithoutCaseAndLeavesOutACutOne) {
  const TemporaryFolder folder;
  const ByteCorpus corpus(
      {.files = {folder.write("a.txt", "It is a Truth universally acknowledged, that a man must want.")},
       .context = 8});
  // "truth" and "must" are known, "univers" and "zebra" are not, "is" is too short, "wan" may be cut.
  const auto count = count_known_words("TRUTH is univers must, zebra must wan", corpus);
  EXPECT_EQ(count.words, 5);
  EXPECT_EQ(count.known, 3);
  EXPECT_DOUBLE_EQ(count.fraction(), 0.6);
  EXPECT_EQ(count_known_words("", corpus).fraction(), 0.0);
}

} // namespace
} // namespace ebb::data
