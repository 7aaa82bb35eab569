#include "documents.h"

#include <algorithm>
#include <cstring>

namespace ebb::data {
namespace {

constexpr std::string_view kSpaces = " \t\r\n\v\f";
constexpr std::size_t kLongestFirstLine = 80;

std::string_view trimmed(std::string_view line) {
  const auto first = line.find_first_not_of(kSpaces);
  if (first == std::string_view::npos) {
    return {};
  }
  return line.substr(first, line.find_last_not_of(kSpaces) - first + 1);
}

} // namespace

std::vector<Document> find_documents(
    std::string_view text, std::size_t file, const std::vector<std::string>& start_lines, std::vector<bool>& found) {
  std::vector<Document> documents;
  const auto begin_at = [&](std::size_t position) {
    if (!documents.empty()) {
      documents.back().end = static_cast<std::int64_t>(position);
    }
    const auto rest = text.substr(position);
    documents.push_back(
        {.file = file,
         .first_line = std::string(trimmed(rest.substr(0, rest.find('\n'))).substr(0, kLongestFirstLine)),
         .begin = static_cast<std::int64_t>(position),
         .end = static_cast<std::int64_t>(text.size())});
  };
  begin_at(0);
  if (start_lines.empty()) {
    return documents;
  }
  std::size_t longest = 0;
  for (const auto& line : start_lines) {
    longest = std::max(longest, line.size());
  }
  for (std::size_t position = 0; position < text.size();) {
    const auto* newline = static_cast<const char*>(std::memchr(text.data() + position, '\n', text.size() - position));
    const std::size_t end = newline ? static_cast<std::size_t>(newline - text.data()) : text.size();
    const auto line = trimmed(text.substr(position, end - position));
    if (!line.empty() && line.size() <= longest) {
      for (std::size_t i = 0; i < start_lines.size(); ++i) {
        if (line == trimmed(start_lines[i])) {
          found[i] = true;
          if (position > 0) { // The file's first line begins a document anyhow.
            begin_at(position);
          }
          break;
        }
      }
    }
    position = end + 1;
  }
  return documents;
}

} // namespace ebb::data
