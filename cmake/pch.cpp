// Owns the precompiled header (see pch.h); has no code of its own.
