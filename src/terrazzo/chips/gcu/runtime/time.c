/* The model of time: how many cycles a launch takes, from what its programs counted.

   Whole numbers only, so that the same counts give the same cycles on every machine.
   docs/gcu.md, "The model of time", has the formulas and the reasons. */
#include "gcu_runtime.h"

#include <stdlib.h>

typedef unsigned __int128 wide; /* bytes of a wave times units pass 64 bits before the division */

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t over(wide amount, int64_t rate) { /* rounded up; a rate of 0 is one of 1 */
  wide divisor = rate > 0 ? (wide)rate : 1;
  wide quotient = (amount + divisor - 1) / divisor;
  return quotient > INT64_MAX / 4 ? INT64_MAX / 4 : (int64_t)quotient;
}

static int64_t count(const int64_t *counts, int which) { return larger(counts[which], 0); }

static int64_t bytes_of(const int64_t *counts) {
  return count(counts, GCU_COUNT_LOAD) + count(counts, GCU_COUNT_STORE);
}

/* The units of one program work side by side, but control steers them all. */
static int64_t compute_cycles(const gcuDescription *chip, const int64_t *counts) {
  int64_t busy = larger(count(counts, GCU_COUNT_VECTOR), count(counts, GCU_COUNT_MATRIX));
  int64_t local = over((wide)count(counts, GCU_COUNT_LOCAL), chip->scratchpad_bytes_per_cycle);
  return larger(busy, local) + count(counts, GCU_COUNT_SCALAR);
}

/* One physical program, while `running` of them share the memory that together move `moved`. */
static int64_t program_cycles(const gcuDescription *chip, const int64_t *counts, int64_t running,
                              wide moved) {
  int64_t compute = compute_cycles(chip, counts), bytes = bytes_of(counts);
  if (bytes == 0) return compute;
  int64_t transfers = larger(count(counts, GCU_COUNT_TRANSFERS), 1);
  wide even = (wide)bytes * (wide)running;
  wide share = even < moved ? even : moved;
  int64_t data = larger(over((wide)bytes, chip->unit_bytes_per_cycle),
                        over(share, chip->memory_bytes_per_cycle));
  int64_t in_flight = larger(chip->dma_in_flight, 1);
  wide waits = (wide)(transfers - 1) * (wide)larger(chip->dma_latency, 0);
  int64_t stream = larger(data, over(waits + (wide)data, in_flight));
  int64_t first = larger(chip->dma_latency, 0);
  if (in_flight == 1) return first + stream + compute;
  return first + larger(compute, stream) + over((wide)smaller(compute, stream), transfers);
}

/* What a physical program counts: its logical ones are a loop in it, and add up. */
static void sum_counts(const int64_t *counts, int64_t programs, int64_t first, int64_t step,
                       int64_t *total) {
  for (int which = 0; which < GCU_COUNTERS; which++) total[which] = 0;
  for (int64_t n = first; n < programs; n += step)
    for (int which = 0; which < GCU_COUNTERS; which++)
      total[which] += count(counts + n * GCU_COUNTERS, which);
}

int64_t gcuModelCycles(const gcuDescription *chip, const int64_t *counts, int64_t programs,
                       int64_t at_once) {
  if (chip == NULL || counts == NULL || programs <= 0) return 0;
  int64_t physical = at_once <= 0 ? programs : smaller(at_once, programs);
  int64_t units = smaller(larger(chip->units, 1), physical), longest = 0;
  int64_t *busy = calloc((size_t)units, sizeof *busy);
  int64_t *wave = calloc((size_t)units * GCU_COUNTERS, sizeof *wave);
  if (busy != NULL && wave != NULL) {
    for (int64_t start = 0; start < physical; start += units) {
      int64_t running = smaller(units, physical - start);
      wide moved = 0;
      for (int64_t u = 0; u < running; u++) {
        sum_counts(counts, programs, start + u, physical, wave + u * GCU_COUNTERS);
        moved += (wide)bytes_of(wave + u * GCU_COUNTERS);
      }
      for (int64_t u = 0; u < running; u++)
        busy[u] += (start > 0 ? larger(chip->wave_cycles, 0) : 0) +
                   program_cycles(chip, wave + u * GCU_COUNTERS, running, moved);
    }
    for (int64_t u = 0; u < units; u++) longest = larger(longest, busy[u]);
    longest += larger(chip->launch_cycles, 0);
  } else {
    longest = -1; /* no memory for two numbers a unit */
  }
  free(busy);
  free(wave);
  return longest;
}
