// AMX: eight tiles of 16 rows of 64 bytes, where the processor and the system have them.

#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define SSD_JAX_TILES 1
#endif

constexpr int64_t kTileRows = 16;

#if defined(SSD_JAX_TILES)

constexpr bool kHasTiles = true;

// Whether the kernel lets this process use tiles.
inline bool TilesAllowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
  return allowed;
}

// The tiles of this thread, while it lives.
struct Tiles {
  explicit Tiles(bool used) : used(used) {
    if (!used) return;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::fill_n(config.bytes, 8, 64);
    std::fill_n(config.rows, 8, kTileRows);
    // GCC 12 takes the intrinsic to read 8 bytes, and drops what is written behind them.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    if (used) _tile_release();
  }
  const bool used;
};

#else

constexpr bool kHasTiles = false;
inline bool TilesAllowed() { return false; }
struct Tiles {
  explicit Tiles(bool) {}
};

#endif
