/* The chip, as it was described, and which of its devices this process sees. */
#include "internal.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

gcuDescription chip;
int device_count;
Device devices[MOST_DEVICES];
_Atomic int host_threads;

enum { NOT_CONFIGURED, CONFIGURED, LOST };
static _Atomic int state = NOT_CONFIGURED;
static _Atomic bool in_use;           /* there is memory, a thread or code that fork() loses */
static pthread_mutex_t configuring = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int current;

static void after_fork(void) {
  /* Threads do not survive a fork, and whoever held a lock may be one of them. What was never
     used can begin again; what was, is the parent's. */
  if (atomic_load(&in_use)) {
    atomic_store(&state, LOST);
    return;
  }
  pthread_mutex_init(&configuring, NULL);
  after_fork_handles();
  after_fork_memory();
  for (int number = 0; number < device_count; number++) {
    pthread_mutex_init(&devices[number].memory.lock, NULL);
    pthread_mutex_init(&devices[number].streams_lock, NULL);
  }
}

static gcuError configured(void) {
  if (atomic_load_explicit(&state, memory_order_acquire) != NOT_CONFIGURED) return gcuSuccess;
  return fail(gcuErrorInitialization, "gcuConfigure was not called: there is no chip yet");
}

gcuError ready(void) {
  int now = atomic_load_explicit(&state, memory_order_acquire);
  if (now == CONFIGURED) return gcuSuccess;
  if (now == NOT_CONFIGURED) return configured();
  return fail(gcuErrorInitialization,
              "process %d was forked from one that used %s, whose memory and streams stay there: "
              "start it by spawn, or fork before the first use", (int)getpid(), chip.name);
}

gcuError claim(void) {
  gcuError error = ready();
  if (!error && !atomic_load_explicit(&in_use, memory_order_relaxed)) atomic_store(&in_use, true);
  return error;
}

/* A list as CUDA_VISIBLE_DEVICES is one: it ends before the first that is no device; a device that
   is named twice makes the list void. */
static int visible_devices(int present) {
  const char *list = getenv("GCU_VISIBLE_DEVICES");
  if (!list) return present;
  bool seen[MOST_DEVICES] = {false};
  int count = 0;
  while (*list) {
    char *end;
    errno = 0;
    long number = strtol(list, &end, 10);
    if (end == list || errno || number < 0 || number >= present) break;
    while (*end == ' ') end++;
    if (*end && *end != ',') break;
    if (seen[number]) return 0;
    seen[number] = true, count++;
    list = *end ? end + 1 : end;
  }
  return count;
}

static int usable_cores(void) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int)online : 1;
}

static int default_threads(void) {
  const char *asked = getenv("GCU_THREADS");
  int threads = asked ? atoi(asked) : 0;
  return threads > 0 ? threads : usable_cores();
}

static gcuError sensible(const gcuDescription *wanted) {
  if (wanted->devices < 0 || wanted->devices > MOST_DEVICES)
    return fail(gcuErrorInvalidValue, "a chip of %d devices (at most %d)", wanted->devices,
                MOST_DEVICES);
  if (wanted->units < 1 || wanted->memory_bytes < 1 || wanted->clock_khz < 1)
    return fail(gcuErrorInvalidValue,
                "a chip of %d units, %lld bytes of memory and a clock of %lld kHz", wanted->units,
                (long long)wanted->memory_bytes, (long long)wanted->clock_khz);
  if (wanted->free_grid < 0 || wanted->grid_multiple < 0)
    return fail(gcuErrorInvalidValue, "a launch rule of %d and multiples of %d",
                wanted->free_grid, wanted->grid_multiple);
  return gcuSuccess;
}

static bool same_chip(const gcuDescription *one, const gcuDescription *other) {
  gcuDescription left = *one, right = *other;
  memset(left.name, 0, sizeof left.name), memset(right.name, 0, sizeof right.name);
  /* Between the small numbers and the large ones there may be bytes that say nothing. */
  size_t small = offsetof(gcuDescription, vector_bits) + sizeof left.vector_bits;
  size_t large = offsetof(gcuDescription, clock_khz);
  return !strncmp(one->name, other->name, sizeof one->name) && !memcmp(&left, &right, small) &&
         !memcmp((char *)&left + large, (char *)&right + large, sizeof left - large);
}

static gcuError configure(const gcuDescription *wanted) {
  gcuError error = sensible(wanted);
  if (error) return error;
  chip = *wanted;
  int visible = visible_devices(chip.devices);
  for (int number = 0; number < visible; number++) {
    Device *device = &devices[number];
    device->number = number;
    pthread_mutex_init(&device->memory.lock, NULL);
    pthread_mutex_init(&device->streams_lock, NULL);
    error = make_stream(device, &device->default_stream);
    if (error) return error;
  }
  device_count = visible;
  atomic_store(&host_threads, default_threads());
  spin_turns = usable_cores() > 1 ? spin_turns : 0;
  catch_faults();
  pthread_atfork(NULL, NULL, after_fork);
  return gcuSuccess;
}

gcuError gcuConfigure(const gcuDescription *description) {
  /* The struct grows at its end: what an older caller does not say is zero. */
  gcuDescription wanted = {0};
  if (!description || description->size < offsetof(gcuDescription, fingerprint) ||
      description->size > sizeof wanted)
    return fail(gcuErrorInvalidValue, "a description of %u bytes, where this library knows %zu",
                description ? description->size : 0, sizeof wanted);
  memcpy(&wanted, description, description->size);
  wanted.size = sizeof wanted;
  wanted.name[sizeof wanted.name - 1] = 0;
  pthread_mutex_lock(&configuring);
  gcuError error = gcuSuccess;
  if (atomic_load(&state) == NOT_CONFIGURED) {
    error = configure(&wanted);
    if (!error) atomic_store_explicit(&state, CONFIGURED, memory_order_release);
  } else if (!same_chip(&chip, &wanted)) {
    error = strcmp(chip.name, wanted.name)
                ? fail(gcuErrorInitialization,
                       "this process has the chip %s already: use %s in another process", chip.name,
                       wanted.name)
                : fail(gcuErrorInitialization,
                       "this process has the chip %s already, described otherwise: start a new one",
                       chip.name);
  }
  pthread_mutex_unlock(&configuring);
  return error;
}

gcuError known_device(int device) {
  gcuError error = configured();
  if (error) return error;
  if (device >= 0 && device < device_count) return gcuSuccess;
  if (!device_count) return fail(gcuErrorInvalidDevice, "no device is visible");
  return fail(gcuErrorInvalidDevice, "there is no device %d, only 0 to %d", device,
              device_count - 1);
}

Device *current_device(void) { return &devices[current]; }

gcuError gcuGetDeviceCount(int *count) {
  gcuError error = configured();
  if (error) return error;
  if (!count) return fail(gcuErrorInvalidValue, "gcuGetDeviceCount(NULL)");
  *count = device_count;
  return gcuSuccess;
}

gcuError gcuSetDevice(int device) {
  gcuError error = known_device(device);
  if (!error) current = device;
  return error;
}

gcuError gcuGetDevice(int *device) {
  gcuError error = known_device(current);
  if (error) return error;
  if (!device) return fail(gcuErrorInvalidValue, "gcuGetDevice(NULL)");
  *device = current;
  return gcuSuccess;
}

gcuError gcuGetDeviceCapability(int *major, int *minor, int device) {
  gcuError error = known_device(device);
  if (error) return error;
  if (!major || !minor) return fail(gcuErrorInvalidValue, "gcuGetDeviceCapability to NULL");
  *major = chip.capability[0], *minor = chip.capability[1];
  return gcuSuccess;
}

gcuError gcuGetDeviceProperties(gcuDeviceProperties *properties, int device) {
  gcuError error = known_device(device);
  if (error) return error;
  if (!properties) return fail(gcuErrorInvalidValue, "gcuGetDeviceProperties to NULL");
  memset(properties, 0, sizeof *properties);
  properties->description = chip;
  properties->device = device;
  snprintf(properties->name, sizeof properties->name, "%s (virtual, %d units)", chip.name,
           chip.units);
  return gcuSuccess;
}

gcuError gcuSetHostThreads(int threads) {
  gcuError error = configured();
  if (error) return error;
  if (threads < 0) return fail(gcuErrorInvalidValue, "%d threads of the host", threads);
  atomic_store(&host_threads, threads ? threads : default_threads());
  return gcuSuccess;
}
