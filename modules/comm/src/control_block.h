#pragma once

#include "operation_header.h"

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace ebb::comm {

// Note [Reading peers' memory]
// Ranks of one host need no messages to move bytes: process_vm_readv(2) copies straight from a peer's tensor into ours,
// once, where loopback sockets copy several times through buffers. What is left to agree on is when a tensor may be read
// and when it has been read. For that every rank has a control block in shared memory, which its peers map.
//
//   1. Operation k of rank p: p fills slot k % kSlots of its block (what it calls, address of its input) and sets
//      `posted` to k + 1. Small inputs are copied into the slot itself.
//   2. A peer q that works on its own operation k sees `posted`, compares what p calls with what it calls itself, reads
//      what it needs from p's memory, and sets read_by[q] to 1. It has no further business in that slot.
//   3. p may overwrite its input when all peers have set read_by, and use the slot again (for k + kSlots) then.
//
// All-reduce of larger tensors adds in place: rank r reads the peers' parts of chunk r, adds them in rank order into its
// own chunk r, and sets `reduced`; then each rank reads chunk j from rank j once j has set `reduced`. That never
// overwrites what is still to be read: chunk j of this rank's tensor is read by rank j alone, before it sets `reduced`.
//
// Nobody reads from a rank that has left or failed: `state` is set before its memory goes away, and looked at after
// each read. Who waits sleeps on a futex in its own block (`bell`), which peers ring after each change if it sleeps.

inline constexpr int kSlots = 64; ///< Operations that a rank may have posted and its peers not yet read.
inline constexpr int kMaxPeers = 64; ///< Ranks of a host.
inline constexpr std::int64_t kInlineBytes = 2048;
static_assert(
    kInlineBytes >= kOnePhaseBytes, "an all-reduce of one phase overwrites its input before peers have read it");

struct alignas(64) ControlSlot {
  std::atomic<std::uint64_t> posted; ///< Operation number + 1, once everything below is valid.
  std::atomic<std::uint32_t> reduced;
  OperationHeader header;
  std::uint64_t address; ///< Of the input in its owner's memory; 0: the input is inline_bytes.
  alignas(64) std::atomic<std::uint8_t> read_by[kMaxPeers];
  alignas(64) char inline_bytes[kInlineBytes];
};

enum class RankState : std::uint32_t { kHere = 0, kLeft = 1, kFailed = 2 };

/// Lives in shared memory, zeroed at first. Written by its rank, but for read_by and bell.
struct ControlBlock {
  std::uint64_t nonce; ///< Tells this block from whatever else may be at that address or under that number.
  std::atomic<RankState> state;
  std::int32_t cause; ///< Of a failure: the rank whose fault it is, maybe another's. Valid once state says so.
  char why[500];
  alignas(64) std::atomic<std::uint32_t> bell;
  std::atomic<std::uint32_t> sleepers;
  ControlSlot slots[kSlots];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint8_t>::is_always_lock_free);
static_assert(std::is_trivially_copyable_v<OperationHeader>);

} // namespace ebb::comm
