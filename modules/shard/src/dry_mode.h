#pragma once

namespace ebb::shard {

/// Whether this thread is in a dry run: tensors have no memory, and nothing is computed.
bool is_dry();

} // namespace ebb::shard
