/* Kernels for the tests of the runtime library, in the form that images hold. */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

void tz_parallel_for(void (*function)(void *, int64_t), void *context, int64_t count,
                     int64_t most_threads);

enum { COUNTERS = 8 };
typedef struct Work { const int64_t *arguments, *grid; int64_t *counters; } Work;

int64_t variable = 40;               /* read and written by `count_up` */
static const float table[4] = {1, 2, 4, 8};

static int64_t programs(const int64_t *grid) { return grid[0] * grid[1] * grid[2]; }

static float float_of(int64_t bits) {
  int32_t low = (int32_t)bits;
  float value;
  memcpy(&value, &low, sizeof value);
  return value;
}

/* p target: adds 1 to target[program], and counts program + 1 vector cycles */
static void mark_one(void *context, int64_t program) {
  Work *work = context;
  ((int64_t *)work->arguments[0])[program] += 1;
  work->counters[program * COUNTERS] += program + 1;
}

void mark(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  Work work = {arguments, grid, counters};
  tz_parallel_for(mark_one, &work, programs(grid), threads);
}

/* p x, p y, f a, i n: y = a * x * table[0] + y, in equal blocks */
static void saxpy_one(void *context, int64_t program) {
  Work *work = context;
  const float *x = (const float *)work->arguments[0];
  float *y = (float *)work->arguments[1], a = float_of(work->arguments[2]);
  int64_t n = work->arguments[3], each = (n + programs(work->grid) - 1) / programs(work->grid);
  int64_t end = (program + 1) * each < n ? (program + 1) * each : n;
  for (int64_t i = program * each; i < end; i++) y[i] += a * x[i] * table[program & 0];
  work->counters[program * COUNTERS + 3] += each * 8;
  work->counters[program * COUNTERS + 4] += each * 4;
}

void saxpy(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  Work work = {arguments, grid, counters};
  tz_parallel_for(saxpy_one, &work, programs(grid), threads);
}

/* i address: writes there; all programs but the last wait a little */
static void poke_one(void *context, int64_t program) {
  Work *work = context;
  if (program + 1 < programs(work->grid)) usleep(1000);
  else *(volatile char *)work->arguments[0] = 1;
}

void poke(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  Work work = {arguments, grid, counters};
  tz_parallel_for(poke_one, &work, programs(grid), threads);
}

/* p target, i a, i b: target[0] = a / b */
void divide(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads, (void)counters;
  *(int64_t *)arguments[0] = arguments[1] / arguments[2];
}

/* i depth: more stack than there is */
static int64_t deeper(int64_t depth) {
  volatile char room[4096];
  room[0] = (char)depth;
  return depth ? deeper(depth - 1) + room[0] : room[0];
}

void overflow(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads;
  counters[0] = deeper(arguments[0]) & 1;
}

/* p target, i microseconds, i value: waits, then target[0] = value */
void late(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads;
  usleep((useconds_t)arguments[1]);
  *(int64_t *)arguments[0] = arguments[2];
  counters[0] = 1000;
}

/* p target: target[0] = 10 * target[0] + digit */
void append(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads, (void)counters;
  int64_t *target = (int64_t *)arguments[0];
  *target = 10 * *target + arguments[1];
}

/* h flag, p target: waits until *flag, a number of the host, and copies it to target; a test that
   fails before it sets the flag holds things up for ten seconds at most */
void await(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads, (void)counters;
  const int64_t *flag = (const int64_t *)arguments[0];
  int64_t seen = 0;
  for (int turn = 0; turn < 100000 && !(seen = __atomic_load_n(flag, __ATOMIC_ACQUIRE)); turn++)
    usleep(100);
  *(int64_t *)arguments[1] = seen;
}

/* p target: each program adds the numbers 0 to 9 to it, in a launch of its own within the launch */
static void nested_inner(void *context, int64_t number) {
  int64_t *target = *(int64_t **)context;
  __atomic_fetch_add(target, number, __ATOMIC_RELAXED);
}

static void nested_one(void *context, int64_t program) {
  int64_t *target = (int64_t *)((Work *)context)->arguments[0];
  (void)program;
  tz_parallel_for(nested_inner, &target, 10, 0);
}

void nested(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  Work work = {arguments, grid, counters};
  tz_parallel_for(nested_one, &work, programs(grid), threads);
}

/* p target: target[0] = sine of target[0], a function of the C library */
void sine(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads, (void)counters;
  double *target = (double *)arguments[0];
  *target = sin(*target);
}

/* p target: target[0] = ++variable */
void count_up(const int64_t *arguments, const int64_t *grid, int64_t threads, int64_t *counters) {
  (void)grid, (void)threads, (void)counters;
  *(int64_t *)arguments[0] = ++variable;
}

/* A plan of one kernel: which thread of the host ran the task of each unit */
static void thread_one(void *context, int64_t task) {
  int64_t *target = context;
  target[task] = gettid();
  usleep(100);
}

void threads(const int64_t *slots, void *arena, int64_t units, int64_t *clock) {
  (void)arena, (void)clock;
  tz_parallel_for(thread_one, (void *)slots[0], units, units);
}

/* A plan of three kernels: the first is called twice, the second once, the third never. */
void plan(const int64_t *slots, void *arena, int64_t threads, int64_t *clock) {
  int64_t *target = (int64_t *)slots[0], *counters = (int64_t *)slots[1], units = slots[2];
  if (threads != units) return; /* which kernels divide their work by */
  int64_t *first = counters, *second = counters + units * COUNTERS;
  *(int64_t *)arena = 5;
  for (int time = 0; time < 2; time++, first[7]++)
    for (int64_t unit = 0; unit < units; unit++) first[unit * COUNTERS] += 100;
  second[7]++, second[0] += 7;
  *target = *(int64_t *)arena + (clock == 0);
}
