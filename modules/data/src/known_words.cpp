#include "ebb/data/byte_corpus.h"

#include <string>
#include <unordered_map>

namespace ebb::data {
namespace {

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/// Calls visit(word in lower case, touches the end of the text).
template <class Visit>
void for_each_word(std::string_view text, Visit&& visit) {
  std::string word;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && is_letter(text[i])) {
      word += static_cast<char>(text[i] | 0x20);
    } else if (!word.empty()) {
      visit(word, i == text.size());
      word.clear();
    }
  }
}

} // namespace

WordCount count_known_words(std::string_view text, const ByteCorpus& corpus, std::size_t min_letters) {
  std::unordered_map<std::string, std::int64_t> occurrences; // of each word of `text`, until it is found in the corpus
  WordCount result;
  for_each_word(text, [&](const std::string& word, bool cut) {
    if (!cut && word.size() >= min_letters) {
      ++occurrences[word];
      ++result.words;
    }
  });
  for (const auto& document : corpus.documents()) {
    if (occurrences.empty()) {
      break;
    }
    for_each_word(corpus.text(document), [&](const std::string& word, bool) {
      if (const auto found = occurrences.find(word); found != occurrences.end()) {
        result.known += found->second;
        occurrences.erase(found);
      }
    });
  }
  return result;
}

} // namespace ebb::data
