/* Launches: what is checked before one is queued, how it runs, and how long the model says that
   it takes. */
#include "internal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define MOST_KEPT ((size_t)1 << 17)   /* counters of a stream from launch to launch: 1 MiB */

typedef void Kernel(const int64_t *arguments, const int64_t *grid, int64_t threads,
                    int64_t *counters);
typedef void Plan(const int64_t *slots, void *arena, int64_t threads, int64_t *clock);

typedef struct Launch {
  Operation operation;
  Function *function;                 /* a reference */
  int64_t grid[3], programs;
  int64_t at_once;                    /* programs that were launched; the rest are folded in */
  void *arena;                        /* of a plan */
  int64_t correlation, tag;
  int64_t arguments[];
} Launch;

/* ---------------------------------------------------------------- running */

/* So many zeros, which the stream keeps for its next launch. */
static int64_t *zeroed_counters(Stream *stream, size_t count) {
  if (count > stream->counters_room) {
    free(stream->counters);
    stream->counters_room = 0;
    stream->counters = calloc(count, sizeof *stream->counters);
    if (stream->counters) stream->counters_room = count;
    return stream->counters;
  }
  if (count) memset(stream->counters, 0, count * sizeof *stream->counters);
  return stream->counters;
}

static void keep_few_counters(Stream *stream) {
  if (stream->counters_room <= MOST_KEPT) return;
  free(stream->counters);
  stream->counters = NULL, stream->counters_room = 0;
}

static void call_entry(Launch *launch, int64_t *counters) {
  const Function *function = launch->function;
  if (!function->is_plan) {
    int64_t threads = atomic_load_explicit(&host_threads, memory_order_relaxed);
    ((Kernel *)function->entry)(launch->arguments, launch->grid, threads, counters);
    return;
  }
  for (int place = 0; place < function->argument_count; place++)
    if (function->kinds[place] == 'c') launch->arguments[place] = (int64_t)(uintptr_t)counters;
  /* Kernels divide their work by the units of the chip, however many threads there are here. */
  ((Plan *)function->entry)(launch->arguments, launch->arena, chip.units, NULL);
}

static bool ran_well(Launch *launch, Stream *stream, int64_t *counters) {
  Guard guard;
  if (!sigsetjmp(guard.jump, 0)) {
    enter(&guard);
    divide_by_units(launch->function->is_plan);
    call_entry(launch, counters);
    leave(&guard);
    return true;
  }
  bool memory = guard.signal == SIGSEGV || guard.signal == SIGBUS;
  char text[80];
  fail_stream(stream, memory ? gcuErrorIllegalAddress : gcuErrorLaunchFailure, "%s %.200s %s",
              launch->function->is_plan ? "the plan" : "the kernel", launch->function->name,
              fault_text(guard.signal, guard.address, text, sizeof text));
  return false;
}

static void record_call(const Launch *launch, Stream *stream, const char *name, int64_t cycles,
                        const int64_t *counters, int64_t programs, int64_t at_once) {
  if (!is_tracing()) return;
  gcuRecord record = {.kind = gcuRecordKernel, .device = stream->device->number,
                      .stream = stream->number, .start = stream->cycles, .cycles = cycles,
                      .programs = programs,
                      .units = at_once < chip.units ? at_once : chip.units,
                      .correlation = launch->correlation, .tag = launch->tag};
  for (int64_t place = 0; place < programs * GCU_COUNTERS; place++)
    record.counts[place % GCU_COUNTERS] += counters[place];
  trace(&record, name);
}

static void run_kernel(Operation *operation, Stream *stream) {
  Launch *launch = (Launch *)operation;
  int64_t *counters = zeroed_counters(stream, (size_t)launch->programs * GCU_COUNTERS);
  if (!counters) {
    fail_stream(stream, gcuErrorOutOfMemory, "no memory to count what %lld programs do",
                (long long)launch->programs);
    return;
  }
  if (!ran_well(launch, stream, counters)) return;
  int64_t cycles = gcuModelCycles(&chip, counters, launch->programs, launch->at_once);
  record_call(launch, stream, launch->function->calls[0], cycles, counters, launch->programs,
              launch->at_once);
  advance(stream, cycles);
  keep_few_counters(stream);
}

/* A kernel of a plan was called any number of times: what it counted is of all of them, and each
   is a launch. */
static void end_call(const Launch *launch, Stream *stream, const char *name,
                     const int64_t *counters) {
  int64_t launches = 0;
  for (int unit = 0; unit < chip.units; unit++)
    launches += counters[unit * GCU_COUNTERS + GCU_COUNT_LAUNCHES];
  if (launches < 1) return;
  int64_t cycles = gcuModelCycles(&chip, counters, chip.units, chip.units) +
                   (launches - 1) * chip.launch_cycles;
  record_call(launch, stream, name, cycles, counters, chip.units, chip.units);
  advance(stream, cycles);
}

static void run_plan(Operation *operation, Stream *stream) {
  Launch *launch = (Launch *)operation;
  size_t each = (size_t)chip.units * GCU_COUNTERS;
  int64_t *counters = zeroed_counters(stream, each * (size_t)launch->function->call_count);
  if (!counters && launch->function->call_count) {
    fail_stream(stream, gcuErrorOutOfMemory, "no memory to count what %d kernels do",
                launch->function->call_count);
    return;
  }
  if (!ran_well(launch, stream, counters)) return;
  for (int call = 0; call < launch->function->call_count; call++)
    end_call(launch, stream, launch->function->calls[call], counters + (size_t)call * each);
}

static void drop_launch(Operation *operation) {
  let_go(((Launch *)operation)->function);
  free(operation);
}

/* ---------------------------------------------------------------- checking */

static gcuError count_programs(unsigned x, unsigned y, unsigned z, int64_t *programs) {
  uint64_t count;
  if (__builtin_mul_overflow((uint64_t)x * y, (uint64_t)z, &count) || count > MOST_PROGRAMS)
    return fail(gcuErrorInvalidGrid, "Invalid grid size %u x %u x %u (at most %lld programs)", x, y,
                z, (long long)MOST_PROGRAMS);
  *programs = (int64_t)count;
  return gcuSuccess;
}

static bool is_accepted(int64_t programs) {
  if (!chip.free_grid || programs <= chip.free_grid) return true;
  return chip.grid_multiple && programs % chip.grid_multiple == 0;
}

static gcuError hold_to_rule(int64_t programs) {
  if (!programs) return fail(gcuErrorInvalidGrid, "Invalid grid size 0 (must be at least 1)");
  if (is_accepted(programs)) return gcuSuccess;
  if (!chip.grid_multiple)
    return fail(gcuErrorInvalidGrid, "Invalid grid size %lld (must be <= %d)", (long long)programs,
                chip.free_grid);
  return fail(gcuErrorInvalidGrid, "Invalid grid size %lld (must be <= %d or multiple of %d)",
              (long long)programs, chip.free_grid, chip.grid_multiple);
}

static int64_t most_accepted(int64_t programs) {
  if (is_accepted(programs)) return programs;
  int64_t whole = chip.grid_multiple ? programs / chip.grid_multiple * chip.grid_multiple : 0;
  return whole > chip.free_grid ? whole : chip.free_grid;
}

static gcuError check_launch(const Function *function, bool as_plan, const int64_t *arguments,
                             int count, Device *device) {
  if (function->is_plan != as_plan)
    return fail(gcuErrorInvalidValue, "%.200s is a %s", function->name,
                as_plan ? "kernel: gcuLaunchKernel runs it" : "plan: gcuLaunchPlan runs it");
  if (count != function->argument_count || (count && !arguments))
    return fail(gcuErrorInvalidValue, "%.200s has %d arguments, and got %d at %p", function->name,
                function->argument_count, count, (const void *)arguments);
  if (function->scratchpad > chip.scratchpad_bytes)
    return fail(gcuErrorScratchpad, "%.200s wants %lld bytes of scratchpad, and a unit has %lld",
                function->name, (long long)function->scratchpad, (long long)chip.scratchpad_bytes);
  return check_addresses(device, function->kinds, arguments, count);
}

/* Takes the reference to the function. */
static gcuError queue(Stream *stream, Function *function, Launch plan, const int64_t *arguments,
                      int count) {
  size_t size = sizeof plan + (size_t)count * sizeof *arguments;
  Launch *launch = malloc(size);
  if (!launch) {
    let_go(function);
    return out_of_host_memory(size);
  }
  *launch = plan;
  launch->operation = (Operation){.run = function->is_plan ? run_plan : run_kernel,
                                  .drop = drop_launch};
  launch->function = function;
  launch->correlation = next_correlation();
  launch->tag = current_tag();
  if (count) memcpy(launch->arguments, arguments, (size_t)count * sizeof *arguments);
  return submit(stream, &launch->operation);
}

/* ---------------------------------------------------------------- what users call */

static gcuError launch(gcuFunction_t handle, Launch plan, bool as_plan, const int64_t *arguments,
                       int count, gcuStream_t stream_handle) {
  Stream *stream;
  gcuError error = find_stream(stream_handle, &stream);
  if (error) return error;
  Function *function = object_of(A_FUNCTION, handle);
  error = function ? stream_error(stream) : stale(A_FUNCTION, handle);
  if (!error) error = check_launch(function, as_plan, arguments, count, stream->device);
  if (!error && plan.arena) error = live_on(stream->device->number, plan.arena, 1, "arena");
  if (!error) error = queue(stream, function, plan, arguments, count);
  else if (function) let_go(function);
  let_go(stream);
  return error;
}

gcuError gcuLaunchKernel(gcuFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         const int64_t *arguments, int count, gcuStream_t stream) {
  Launch plan = {.grid = {grid_x, grid_y, grid_z}};
  gcuError error = ready();
  if (!error) error = count_programs(grid_x, grid_y, grid_z, &plan.programs);
  if (!error) error = hold_to_rule(plan.programs);
  plan.at_once = plan.programs;
  return error ? error : launch(function, plan, false, arguments, count, stream);
}

gcuError gcuLaunchFolded(gcuFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         const int64_t *arguments, int count, gcuStream_t stream) {
  Launch plan = {.grid = {grid_x, grid_y, grid_z}};
  gcuError error = ready();
  if (!error) error = count_programs(grid_x, grid_y, grid_z, &plan.programs);
  if (error || !plan.programs) return error;
  plan.at_once = most_accepted(plan.programs);
  return launch(function, plan, false, arguments, count, stream);
}

gcuError gcuLaunchPlan(gcuFunction_t function, const int64_t *slots, int count, void *arena,
                       gcuStream_t stream) {
  Launch plan = {.arena = arena};
  gcuError error = ready();
  return error ? error : launch(function, plan, true, slots, count, stream);
}
