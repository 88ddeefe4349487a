/* Streams: operations in the order in which they came, run by a thread of the stream's own, and a
   modelled clock that they advance. */
#include "internal.h"

#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int spin_turns = 2000;                /* some 30 us, in which a next launch usually comes */

static _Atomic int64_t stream_numbers;
static _Thread_local Stream *working_for; /* the stream whose thread this is */

/* ---------------------------------------------------------------- threads */

void relax(int turn) {
  /* On a crowded machine the one that is waited for may need this very core. */
  if (turn % 64 == 63) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  atomic_signal_fence(memory_order_seq_cst);
#endif
}

bool start_thread(void *(*function)(void *), void *argument) {
  pthread_attr_t attributes;
  pthread_t thread;
  sigset_t all, old;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, THREAD_STACK);
  /* Signals are for the threads of the program, but for what our own code does. */
  sigfillset(&all);
  sigdelset(&all, SIGSEGV), sigdelset(&all, SIGBUS);
  sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  bool started = !pthread_create(&thread, &attributes, function, argument);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_attr_destroy(&attributes);
  return started;
}

/* ---------------------------------------------------------------- the life of a stream */

static void destroy_stream(Object *object) {
  Stream *stream = (Stream *)object;
  pthread_mutex_destroy(&stream->lock);
  pthread_cond_destroy(&stream->work);
  pthread_cond_destroy(&stream->progress);
  free(stream->counters);
  free(stream);
}

gcuError make_stream(Device *device, Stream **made) {
  Stream *stream = calloc(1, sizeof *stream);
  if (!stream) return out_of_host_memory(sizeof *stream);
  stream->object.references = 1;
  stream->object.destroy = destroy_stream;
  stream->device = device;
  stream->number = atomic_fetch_add(&stream_numbers, 1);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->work, NULL);
  pthread_cond_init(&stream->progress, NULL);
  /* The device's list has a reference of its own, until the stream is closed and empty. */
  keep(stream);
  pthread_mutex_lock(&device->streams_lock);
  stream->next = device->streams;
  device->streams = stream;
  pthread_mutex_unlock(&device->streams_lock);
  *made = stream;
  return gcuSuccess;
}

static void retire(Stream *stream) {
  Device *device = stream->device;
  pthread_mutex_lock(&device->streams_lock);
  Stream **link = &device->streams;
  while (*link && *link != stream) link = &(*link)->next;
  bool listed = *link;
  if (listed) *link = stream->next;
  pthread_mutex_unlock(&device->streams_lock);
  if (listed) let_go(stream);
}

/* Takes the handle's reference. What is queued still runs. */
static void close_stream(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  stream->closing = true;
  bool has_thread = stream->has_thread;
  pthread_cond_signal(&stream->work);
  pthread_mutex_unlock(&stream->lock);
  if (!has_thread) retire(stream);
  let_go(stream);
}

gcuError find_stream(gcuStream_t handle, Stream **stream) {
  gcuError error = claim();
  if (!error) error = known_device(current_device()->number);
  if (error) return error;
  if (handle) {
    *stream = object_of(A_STREAM, handle);
    return *stream ? gcuSuccess : stale(A_STREAM, handle);
  }
  *stream = current_device()->default_stream;
  keep(*stream);
  return gcuSuccess;
}

/* ---------------------------------------------------------------- failures and the clock */

gcuError stream_error(Stream *stream) {
  int code = atomic_load_explicit(&stream->error, memory_order_acquire);
  return code ? fail(code, "%s", stream->message) : gcuSuccess;
}

void fail_stream(Stream *stream, gcuError code, const char *format, ...) {
  if (atomic_load(&stream->error)) return;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(stream->message, sizeof stream->message, format, arguments);
  va_end(arguments);
  atomic_store_explicit(&stream->error, code, memory_order_release);
}

void advance(Stream *stream, int64_t cycles) {
  int64_t now = atomic_load_explicit(&stream->cycles, memory_order_relaxed);
  if (__builtin_add_overflow(now, cycles, &now)) now = INT64_MAX;
  atomic_store_explicit(&stream->cycles, now, memory_order_relaxed);
}

/* ---------------------------------------------------------------- work */

static void run(Stream *stream, Operation *operation) {
  if (operation->always || !atomic_load_explicit(&stream->error, memory_order_relaxed))
    operation->run(operation, stream);
  operation->drop(operation);
  atomic_fetch_add(&stream->done, 1);
  if (atomic_load(&stream->waiters)) {
    pthread_mutex_lock(&stream->lock);
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&stream->lock);
  }
}

/* The operations that wait, for the stream's thread to run; NULL: the stream is closed. */
static Operation *take_work(Stream *stream) {
  for (int turn = 0; turn < spin_turns; turn++) {
    if (atomic_load_explicit(&stream->queued, memory_order_relaxed) !=
        atomic_load_explicit(&stream->taken, memory_order_relaxed)) break;
    relax(turn);
  }
  pthread_mutex_lock(&stream->lock);
  while (stream->busy || (!stream->first && !stream->closing)) {
    stream->asleep = true;
    pthread_cond_wait(&stream->work, &stream->lock);
    stream->asleep = false;
  }
  Operation *first = stream->first;
  stream->first = stream->last = NULL;
  stream->taken = atomic_load(&stream->queued);
  stream->busy = first != NULL;
  pthread_mutex_unlock(&stream->lock);
  return first;
}

static void end_turn(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  stream->busy = false;
  if (stream->asleep && (stream->first || stream->closing)) pthread_cond_signal(&stream->work);
  pthread_mutex_unlock(&stream->lock);
}

static void *work(void *argument) {
  Stream *stream = argument;
  static const size_t signal_stack = (size_t)64 << 10;
  stack_t stack = {.ss_sp = malloc(signal_stack), .ss_size = signal_stack};
  if (stack.ss_sp) sigaltstack(&stack, NULL);
  working_for = stream;
  Operation *operation;
  while ((operation = take_work(stream))) {
    while (operation) {
      Operation *next = operation->next;
      run(stream, operation);
      operation = next;
    }
    end_turn(stream);
  }
  retire(stream);
  let_go(stream);
  if (stack.ss_sp) {
    stack_t none = {.ss_flags = SS_DISABLE};
    sigaltstack(&none, NULL);
    free(stack.ss_sp);
  }
  return NULL;
}

/* With the stream's lock held. */
static gcuError append(Stream *stream, Operation *operation) {
  if (!stream->has_thread) {
    keep(stream);
    if (!start_thread(work, stream)) {
      atomic_fetch_sub(&stream->object.references, 1);
      return fail(gcuErrorOutOfMemory, "the system gives no thread for stream %lld",
                  (long long)stream->number);
    }
    stream->has_thread = true;
  }
  operation->next = NULL;
  if (stream->last) stream->last->next = operation;
  else stream->first = operation;
  stream->last = operation;
  atomic_fetch_add(&stream->queued, 1);
  return gcuSuccess;
}

gcuError submit(Stream *stream, Operation *operation) {
  gcuError error = stream_error(stream);
  if (!error) {
    pthread_mutex_lock(&stream->lock);
    error = append(stream, operation);
    bool wake = stream->asleep && !stream->busy;
    pthread_mutex_unlock(&stream->lock);
    if (wake && !error) pthread_cond_signal(&stream->work);
  }
  if (error) operation->drop(operation);
  return error;
}

static void wait_until(Stream *stream, uint64_t target) {
  for (int turn = 0; turn < spin_turns; turn++) {
    if (atomic_load(&stream->done) >= target) return;
    relax(turn);
  }
  atomic_fetch_add(&stream->waiters, 1);
  pthread_mutex_lock(&stream->lock);
  while (atomic_load(&stream->done) < target) pthread_cond_wait(&stream->progress, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
  atomic_fetch_sub(&stream->waiters, 1);
}

gcuError submit_and_wait(Stream *stream, Operation *operation) {
  gcuError error = stream_error(stream);
  if (error) {
    operation->drop(operation);
    return error;
  }
  pthread_mutex_lock(&stream->lock);
  bool idle = !stream->busy && !stream->first;
  uint64_t target = 0;
  if (idle) {
    /* Nobody runs anything: this thread does it, and saves waking another. */
    stream->busy = true;
    target = atomic_fetch_add(&stream->queued, 1) + 1;
    stream->taken = target;
  } else {
    error = append(stream, operation);
    target = atomic_load(&stream->queued);
  }
  pthread_mutex_unlock(&stream->lock);
  if (error) {
    operation->drop(operation);
    return error;
  }
  if (idle) {
    run(stream, operation);
    end_turn(stream);
  } else {
    wait_until(stream, target);
  }
  return stream_error(stream);
}

gcuError wait_for(Stream *stream) {
  wait_until(stream, atomic_load(&stream->queued));
  return stream_error(stream);
}

gcuError may_wait(const char *call) {
  if (!working_for) return gcuSuccess;
  return fail(gcuErrorInvalidValue, "%s must not be called by a function of a stream, which would "
              "wait for itself", call);
}

/* The streams of a device, each with a new reference; NULL: no memory. */
static Stream **streams_of(Device *device, size_t *count) {
  pthread_mutex_lock(&device->streams_lock);
  *count = 0;
  for (Stream *stream = device->streams; stream; stream = stream->next) ++*count;
  Stream **streams = malloc((*count + 1) * sizeof *streams);
  size_t place = 0;
  for (Stream *stream = streams ? device->streams : NULL; stream; stream = stream->next) {
    keep(stream);
    streams[place++] = stream;
  }
  pthread_mutex_unlock(&device->streams_lock);
  return streams;
}

gcuError wait_for_device(Device *device) {
  size_t count;
  Stream **streams = streams_of(device, &count);
  if (!streams) return out_of_host_memory(count * sizeof *streams);
  gcuError error = gcuSuccess;
  for (size_t place = 0; place < count; place++) {
    wait_until(streams[place], atomic_load(&streams[place]->queued));
    /* What a stream failed with goes with it: it may end before anybody asks, or after. */
    pthread_mutex_lock(&streams[place]->lock);
    bool closed = streams[place]->closing;
    pthread_mutex_unlock(&streams[place]->lock);
    if (!error && !closed) error = stream_error(streams[place]);
    let_go(streams[place]);
  }
  free(streams);
  return error;
}

void wait_for_all_devices(void) {
  for (int number = 0; number < device_count; number++) wait_for_device(&devices[number]);
}

/* ---------------------------------------------------------------- what users call */

gcuError gcuStreamCreate(gcuStream_t *handle) {
  gcuError error = claim();
  if (!error) error = known_device(current_device()->number);
  if (error) return error;
  if (!handle) return fail(gcuErrorInvalidValue, "gcuStreamCreate to NULL");
  Stream *stream;
  error = make_stream(current_device(), &stream);
  if (error) return error;
  stream->handle = open_handle(A_STREAM, &stream->object);
  if (!stream->handle) {
    close_stream(stream);
    return fail(gcuErrorOutOfMemory, "there is no room for another stream");
  }
  *handle = stream->handle;
  return gcuSuccess;
}

gcuError gcuStreamCreateWithPriority(gcuStream_t *handle, int priority) {
  (void)priority; /* units are not shared out between streams: each is modelled by itself */
  return gcuStreamCreate(handle);
}

gcuError gcuStreamDestroy(gcuStream_t handle) {
  gcuError error = ready();
  if (error) return error;
  Stream *stream = close_handle(A_STREAM, handle);
  if (!stream) return stale(A_STREAM, handle);
  close_stream(stream);
  return gcuSuccess;
}

gcuError gcuStreamSynchronize(gcuStream_t handle) {
  Stream *stream;
  gcuError error = may_wait("gcuStreamSynchronize");
  if (!error) error = find_stream(handle, &stream);
  if (error) return error;
  error = wait_for(stream);
  let_go(stream);
  return error;
}

gcuError gcuStreamQuery(gcuStream_t handle) {
  Stream *stream;
  gcuError error = find_stream(handle, &stream);
  if (error) return error;
  error = stream_error(stream);
  if (!error && atomic_load(&stream->done) < atomic_load(&stream->queued)) error = gcuErrorNotReady;
  let_go(stream);
  return error;
}

gcuError gcuStreamGetCycles(int64_t *cycles, gcuStream_t handle) {
  Stream *stream;
  gcuError error = may_wait("gcuStreamGetCycles");
  if (!error) error = find_stream(handle, &stream);
  if (error) return error;
  error = wait_for(stream);
  if (!error && !cycles) error = fail(gcuErrorInvalidValue, "gcuStreamGetCycles to NULL");
  if (!error) *cycles = atomic_load(&stream->cycles);
  let_go(stream);
  return error;
}

gcuError gcuDeviceSynchronize(void) {
  gcuError error = claim();
  if (!error) error = known_device(current_device()->number);
  if (!error) error = may_wait("gcuDeviceSynchronize");
  return error ? error : wait_for_device(current_device());
}

gcuError gcuDeviceReset(void) {
  gcuError error = claim();
  if (!error) error = known_device(current_device()->number);
  if (!error) error = may_wait("gcuDeviceReset");
  if (error) return error;
  Device *device = current_device();
  size_t count;
  Stream **streams = streams_of(device, &count);
  if (!streams) return out_of_host_memory(count * sizeof *streams);
  for (size_t place = 0; place < count; place++) {
    Stream *stream = streams[place];
    wait_until(stream, atomic_load(&stream->queued));
    if (stream == device->default_stream) {
      atomic_store(&stream->error, gcuSuccess);
      atomic_store(&stream->cycles, 0);
    } else {
      Stream *closed = close_handle(A_STREAM, stream->handle);
      if (closed) close_stream(closed);
    }
    let_go(stream);
  }
  free(streams);
  free_all(device);
  return gcuSuccess;
}

/* ---------------------------------------------------------------- functions of the host */

typedef struct HostCall { Operation operation; void (*function)(void *); void *data; } HostCall;

static void run_host_call(Operation *operation, Stream *stream) {
  HostCall *call = (HostCall *)operation;
  (void)stream;
  call->function(call->data);
}

static void drop_host_call(Operation *operation) { free(operation); }

gcuError gcuLaunchHostFunction(gcuStream_t handle, void (*function)(void *), void *data) {
  Stream *stream;
  gcuError error = find_stream(handle, &stream);
  if (error) return error;
  HostCall *call = function ? calloc(1, sizeof *call) : NULL;
  if (!function) error = fail(gcuErrorInvalidValue, "gcuLaunchHostFunction of NULL");
  else if (!call) error = out_of_host_memory(sizeof *call);
  if (!error) {
    *call = (HostCall){{.run = run_host_call, .drop = drop_host_call}, function, data};
    error = submit(stream, &call->operation);
  }
  let_go(stream);
  return error;
}
