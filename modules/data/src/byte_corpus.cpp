#include "ebb/data/byte_corpus.h"

#include "documents.h"
#include "ebb/base/error.h"

#include <algorithm>
#include <cmath>

namespace ebb::data {
namespace {

std::string_view as_text(std::span<const std::uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void check(const ByteCorpusOptions& options) {
  TORCH_CHECK_VALUE(!options.files.empty(), "[ByteCorpus] expected at least one text file, got none; name one");
  TORCH_CHECK_VALUE(
      options.context >= 1, "[ByteCorpus] context must be at least 1, got ", options.context,
      "; give the model's context");
  TORCH_CHECK_VALUE(
      options.validation_fraction >= 0 && options.validation_fraction < 1,
      "[ByteCorpus] validation_fraction must be in [0, 1), got ", options.validation_fraction,
      "; 0.1 keeps the last tenth of each document");
  for (const auto& line : options.document_start) {
    TORCH_CHECK_VALUE(
        line.find_first_not_of(" \t\r\n\v\f") != std::string::npos && line.find('\n') == std::string::npos,
        "[ByteCorpus] document_start must hold single lines that are not blank, got '", line, "'");
  }
}

} // namespace

ByteCorpus::ByteCorpus(ByteCorpusOptions options) : options_(std::move(options)) {
  check(options_);
  std::vector<bool> found(options_.document_start.size());
  for (const auto& path : options_.files) {
    const auto& file = files_.emplace_back(path);
    if (file.bytes().size() <= static_cast<std::size_t>(options_.context)) {
      EBB_THROW(
          FormatError, "[ByteCorpus] '", path, "' holds ", file.bytes().size(), " bytes, a window needs ",
          options_.context + 1, " (context + 1); give a longer file or a smaller context");
    }
    for (auto& document : find_documents(as_text(file.bytes()), files_.size() - 1, options_.document_start, found)) {
      const auto size = document.end - document.begin;
      document.split = document.end -
                       static_cast<std::int64_t>(std::floor(static_cast<double>(size) * options_.validation_fraction));
      add_part(train_, file.bytes().subspan(document.begin, document.split - document.begin));
      add_part(validation_, file.bytes().subspan(document.split, document.end - document.split));
      documents_.push_back(std::move(document));
    }
  }
  const auto missing = std::find(found.begin(), found.end(), false);
  TORCH_CHECK_VALUE(
      missing == found.end(), "[ByteCorpus] no line of the ", files_.size(), " file(s) equals the document start '",
      options_.document_start[missing - found.begin()], "'; give a line as it stands in the text, or leave it out");
  if (train_.count == 0) {
    EBB_THROW(
        FormatError, "[ByteCorpus] no document of '", options_.files.front(), "'",
        options_.files.size() > 1 ? " and the other files" : "", " has the ", options_.context + 1,
        " bytes of a training window (context + 1) before its validation part; give longer documents, a smaller "
        "context or a smaller validation_fraction");
  }
}

void ByteCorpus::add_part(Windows& windows, std::span<const std::uint8_t> bytes) {
  windows.bytes += static_cast<std::int64_t>(bytes.size());
  const auto count = (static_cast<std::int64_t>(bytes.size()) - 1) / options_.context;
  if (!bytes.empty() && count > 0) {
    windows.parts.push_back({windows.count, bytes.data()});
    windows.count += count;
  }
}

std::int64_t ByteCorpus::num_windows(Split split) const {
  return windows_of(split).count;
}

std::int64_t ByteCorpus::num_bytes(Split split) const {
  return windows_of(split).bytes;
}

std::span<const std::uint8_t> ByteCorpus::window(Split split, std::int64_t index) const {
  const auto& windows = windows_of(split);
  TORCH_CHECK_VALUE(
      index >= 0 && index < windows.count, "[ByteCorpus::window] expected an index in [0, ", windows.count, "), got ",
      index);
  const auto after = std::upper_bound(
      windows.parts.begin(), windows.parts.end(), index,
      [](std::int64_t i, const Part& part) { return i < part.first_window; });
  const auto& part = *std::prev(after);
  return {part.bytes + (index - part.first_window) * options_.context, static_cast<std::size_t>(options_.context) + 1};
}

std::string_view ByteCorpus::text(const Document& document) const {
  return as_text(files_.at(document.file).bytes()).substr(document.begin, document.end - document.begin);
}

} // namespace ebb::data
