#pragma once

#include "ebb/data/byte_corpus.h"

#include <string>
#include <string_view>
#include <vector>

namespace ebb::data {

/// Cuts one file into documents, without split. `found[i]` becomes true when start_lines[i] occurs.
std::vector<Document> find_documents(
    std::string_view text, std::size_t file, const std::vector<std::string>& start_lines, std::vector<bool>& found);

} // namespace ebb::data
