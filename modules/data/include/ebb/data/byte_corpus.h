#pragma once

#include "ebb/data/mapped_file.h"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ebb::data {

/// Training and validation never share a byte.
enum class Split { kTrain, kValidation };

/// How a corpus is cut.
struct ByteCorpusOptions {
  std::vector<std::string> files = {}; ///< At least one.
  /// Lines at which a new document begins, compared without surrounding spaces. Each must occur at least once in the
  /// files together. Empty: every file is one document.
  std::vector<std::string> document_start = {};
  std::int64_t context = 64; ///< Tokens the model sees; a window has one byte more, the last target.
  double validation_fraction = 0.1; ///< Of each document, taken from its end; in [0, 1).
};

/// One document: bytes [begin, end) of a file, of which [split, end) is kept for validation.
struct Document {
  std::size_t file = 0; ///< Index into ByteCorpusOptions::files.
  std::string first_line; ///< At most 80 characters.
  std::int64_t begin = 0;
  std::int64_t split = 0;
  std::int64_t end = 0;
};

/// Text files as byte-level tokens, cut into documents, split, and cut into windows of context + 1 bytes.
///
/// Windows start every `context` bytes, so that each byte but a part's first is a target once; they cross neither a
/// document's end nor the border between training and validation. The bytes that do not fill a last window are left
/// out. Numbered from 0 in file order, separately for the two splits.
///
/// Thread-safe: nothing changes after construction. Cost: one pass over the files when `document_start` is given, else
/// none; no copy of the text is held.
class ByteCorpus {
 public:
  /// @throws ValueError for options out of range, files that cannot be opened, start lines that never occur;
  ///         FormatError for an empty file, and where no file has a part that is long enough for one training window.
  explicit ByteCorpus(ByteCorpusOptions options);

  const ByteCorpusOptions& options() const {
    return options_;
  }
  const std::vector<Document>& documents() const {
    return documents_;
  }
  /// Windows of a split, over all files.
  std::int64_t num_windows(Split split) const;
  /// Bytes of a split, over all files; those that fill no window included.
  std::int64_t num_bytes(Split split) const;

  /// The context + 1 bytes of window `index`, 0 <= index < num_windows(split).
  std::span<const std::uint8_t> window(Split split, std::int64_t index) const;

  /// All text of a document, validation included.
  std::string_view text(const Document& document) const;

 private:
  struct Part {
    std::int64_t first_window; ///< Number of the part's first window.
    const std::uint8_t* bytes;
  };
  struct Windows {
    std::vector<Part> parts; ///< Only parts that have windows, ascending.
    std::int64_t count = 0;
    std::int64_t bytes = 0;
  };
  void add_part(Windows& windows, std::span<const std::uint8_t> bytes);
  const Windows& windows_of(Split split) const {
    return split == Split::kTrain ? train_ : validation_;
  }

  ByteCorpusOptions options_;
  std::vector<MappedFile> files_;
  std::vector<Document> documents_;
  Windows train_;
  Windows validation_;
};

/// Words of at least `min_letters` letters in `text`, and how many of them occur in the corpus as whole words.
struct WordCount {
  std::int64_t words = 0;
  std::int64_t known = 0;
  double fraction() const {
    return words == 0 ? 0.0 : static_cast<double>(known) / static_cast<double>(words);
  }
};

/// A word is a longest run of the letters A to Z, compared without case. A word that touches the end of `text` may be
/// cut and is not counted. Cost: one pass over the corpus; memory for the words of `text` only.
WordCount count_known_words(std::string_view text, const ByteCorpus& corpus, std::size_t min_letters = 3);

} // namespace ebb::data
