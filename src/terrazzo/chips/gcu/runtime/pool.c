/* The threads that the programs of kernels run on:

       void tz_parallel_for(void (*fn)(void *ctx, int64_t chunk), void *ctx, int64_t n,
                            int64_t max_threads);

   calls `fn` once for every chunk, on as many threads as are asked for (0: on as many as kernels
   run on, gcuSetHostThreads), and returns when all have run. A call from within a chunk runs
   serially. Whoever calls takes chunks too, and a job is off the list before its caller waits, so
   that a thread that comes late finds nothing to join. */
#include "internal.h"

#include <signal.h>
#include <stdlib.h>

#define MOST_WORKERS 255

typedef struct Job {
  struct Job *next;
  void (*function)(void *, int64_t);
  void *context;
  int64_t count;
  int places;                         /* for threads that may still join */
  int running;                        /* that have joined and not left */
  _Atomic int64_t ticket;
  _Atomic int signal;                 /* of the first fault; then the rest is not begun */
  void *_Atomic address;
  pthread_cond_t left;
} Job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static Job *jobs;
static _Atomic uint64_t posted;       /* jobs since the library was loaded */
static int workers, sleepers;
static _Thread_local bool inside;
static _Thread_local bool asks_for_units;

void divide_by_units(bool yes) { asks_for_units = yes; }

static void run_chunks(Job *job) {
  Guard guard;
  inside = true;
  if (sigsetjmp(guard.jump, 0)) {
    int none = 0;
    if (atomic_compare_exchange_strong(&job->signal, &none, guard.signal))
      atomic_store(&job->address, guard.address);
  } else {
    enter(&guard);
    while (!atomic_load_explicit(&job->signal, memory_order_relaxed)) {
      int64_t chunk = atomic_fetch_add_explicit(&job->ticket, 1, memory_order_relaxed);
      if (chunk >= job->count) break;
      job->function(job->context, chunk);
    }
    leave(&guard);
  }
  inside = false;
}

/* With the lock held: a job that a thread may join. */
static Job *open_job(void) {
  for (Job *job = jobs; job; job = job->next)
    if (job->places > 0 && atomic_load_explicit(&job->ticket, memory_order_relaxed) < job->count)
      return job;
  return NULL;
}

static Job *join_job(void) {
  uint64_t seen = atomic_load_explicit(&posted, memory_order_relaxed);
  pthread_mutex_lock(&lock);
  Job *job = open_job();
  pthread_mutex_unlock(&lock);
  if (!job)
    for (int turn = 0; turn < spin_turns; turn++) {
      if (atomic_load_explicit(&posted, memory_order_relaxed) != seen) break;
      relax(turn);
    }
  pthread_mutex_lock(&lock);
  while (!(job = open_job())) {
    sleepers++;
    pthread_cond_wait(&work, &lock);
    sleepers--;
  }
  job->places--, job->running++;
  pthread_mutex_unlock(&lock);
  return job;
}

static void *work_on_jobs(void *unused) {
  static const size_t signal_stack = (size_t)64 << 10;
  stack_t stack = {.ss_sp = malloc(signal_stack), .ss_size = signal_stack};
  if (stack.ss_sp) sigaltstack(&stack, NULL);
  (void)unused;
  for (;;) {
    Job *job = join_job();
    run_chunks(job);
    pthread_mutex_lock(&lock);
    if (!--job->running) pthread_cond_signal(&job->left);
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

/* With the lock held: threads that jobs have, or still have places for. */
static int helpers_of_all(void) {
  int count = 0;
  for (Job *job = jobs; job; job = job->next) count += job->places + job->running;
  return count;
}

static void post(Job *job, int helpers, bool each_waits) {
  pthread_mutex_lock(&lock);
  int needed = each_waits ? helpers + helpers_of_all() : helpers;
  while (workers < needed && workers < MOST_WORKERS && start_thread(work_on_jobs, NULL)) workers++;
  job->next = jobs;
  jobs = job;
  int wake = helpers < sleepers ? helpers : sleepers;
  atomic_fetch_add(&posted, 1);
  pthread_mutex_unlock(&lock);
  while (wake-- > 0) pthread_cond_signal(&work);
}

static void finish(Job *job) {
  pthread_mutex_lock(&lock);
  Job **link = &jobs;
  while (*link != job) link = &(*link)->next;
  *link = job->next;
  while (job->running) pthread_cond_wait(&job->left, &lock);
  pthread_mutex_unlock(&lock);
}

void tz_parallel_for(void (*function)(void *, int64_t), void *context, int64_t count,
                     int64_t most_threads) {
  int64_t usual = atomic_load_explicit(&host_threads, memory_order_relaxed);
  /* More than usual are asked for by kernels whose programs wait for each other; plans only divide
     their work by the units of the chip. */
  int64_t threads = most_threads > 0 ? most_threads : usual;
  if (asks_for_units && threads > usual) threads = usual;
  if (count < threads) threads = count;
  if (inside || threads < 2) {
    for (int64_t chunk = 0; chunk < count; chunk++) function(context, chunk);
    return;
  }
  Job job = {.function = function, .context = context, .count = count, .places = (int)threads - 1};
  pthread_cond_init(&job.left, NULL);
  post(&job, (int)threads - 1, threads > usual);
  run_chunks(&job);
  finish(&job);
  pthread_cond_destroy(&job.left);
  if (job.signal) hit_outer(job.signal, job.address);
}
