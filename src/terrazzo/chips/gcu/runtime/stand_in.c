/* Until the model of time is there: one cycle for each program. */
#include "gcu_runtime.h"

__attribute__((weak)) int64_t gcuModelCycles(const gcuDescription *chip, const int64_t *counts,
                                             int64_t programs, int64_t at_once) {
  (void)chip, (void)counts, (void)at_once;
  return programs;
}
