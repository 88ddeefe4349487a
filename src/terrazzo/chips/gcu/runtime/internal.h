/* What the files of the library share. Nothing here is seen outside it. */
#ifndef GCU_INTERNAL_H
#define GCU_INTERNAL_H

#include "gcu_runtime.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>

#define MOST_DEVICES 64
#define ALIGNMENT 512                 /* of memory of a device, in bytes */
#define MOST_PROGRAMS INT32_MAX       /* of one launch */
#define THREAD_STACK ((size_t)8 << 20)

/* ---- errors.c: what went wrong in this thread */
gcuError fail(gcuError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
gcuError out_of_host_memory(size_t size);

/* ---- handles.c: what users hold are numbers that are looked up, never followed */
typedef enum Kind { A_STREAM = 1, AN_EVENT = 2, A_MODULE = 3, A_FUNCTION = 4 } Kind;

typedef struct Object {
  _Atomic int references;
  void (*destroy)(struct Object *);
} Object;

void keep(void *object);
void let_go(void *object);                          /* destroyed with the last reference */
void *open_handle(Kind kind, Object *object);       /* NULL: no memory; takes the reference */
void *object_of(Kind kind, const void *handle);     /* a new reference, or NULL */
void *close_handle(Kind kind, const void *handle);  /* the table's reference, or NULL */
gcuError stale(Kind kind, const void *handle);
void after_fork_handles(void);

/* ---- devices.c: the chip and its devices */
typedef struct Block { uintptr_t start; size_t size; } Block; /* as asked for; not rounded */

typedef struct Stream Stream;

typedef struct Memory {
  pthread_mutex_t lock;
  _Atomic uintptr_t start;            /* of the range of addresses; 0 until something is there */
  size_t range;
  uintptr_t next;                     /* where to look for room: what was freed rests a while */
  Block *blocks;                      /* live ones, by address */
  size_t count, room;
  int64_t allocated, peak, allocations;
} Memory;

typedef struct Device {
  int number;
  Memory memory;
  pthread_mutex_t streams_lock;
  Stream *streams;                    /* all that still have work or a handle */
  Stream *default_stream;
} Device;

extern gcuDescription chip;
extern int device_count;
extern Device devices[MOST_DEVICES];
extern _Atomic int host_threads;

gcuError ready(void);                 /* whether calls can be answered in this process */
gcuError claim(void);                 /* the same, for what a forked child cannot have: remembers */
gcuError known_device(int device);
Device *current_device(void);

/* ---- memory.c: which addresses are live */
typedef struct Place {
  int device;                         /* HOST, or MODULE: variables, which are of all devices */
  bool live;                          /* all bytes that were asked for */
  Block block;                        /* the one that it is in; size 0: none */
} Place;
enum { HOST = -1, MODULE = -2 };

Place place_of(const void *pointer, size_t size);
gcuError live_on(int device, const void *pointer, size_t size, const char *what);
gcuError check_addresses(Device *device, const char *kinds, const int64_t *arguments, int count);
bool is_pinned(const void *pointer, size_t size);
gcuError add_variables(uintptr_t start, size_t size);
void remove_variables(uintptr_t start);
void free_all(Device *device);
void after_fork_memory(void);

/* ---- streams.c: queues of operations, each with a thread */
typedef struct Operation {
  struct Operation *next;
  void (*run)(struct Operation *, Stream *);
  void (*drop)(struct Operation *);   /* frees it, run or not */
  bool always;                        /* runs on a stream that failed too */
} Operation;

struct Stream {
  Object object;
  Device *device;
  Stream *next;                       /* of the device's */
  int64_t number;
  pthread_mutex_t lock;
  pthread_cond_t work, progress;
  Operation *first, *last;            /* that nobody has taken */
  void *handle;                       /* NULL: the default stream of its device */
  _Atomic uint64_t queued, taken, done; /* operations since the stream was made */
  _Atomic int waiters;
  bool asleep, busy, closing, has_thread;
  _Atomic int64_t cycles;             /* the modelled clock: written by who runs operations */
  _Atomic int error;
  char message[400];
  int64_t *counters;                  /* kept from launch to launch */
  size_t counters_room;
};

gcuError make_stream(Device *device, Stream **stream);
gcuError find_stream(gcuStream_t handle, Stream **stream); /* adds a reference */
gcuError stream_error(Stream *stream);               /* the one that it failed with */
void fail_stream(Stream *stream, gcuError code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
gcuError submit(Stream *stream, Operation *operation);     /* takes the operation */
gcuError submit_and_wait(Stream *stream, Operation *operation);
gcuError wait_for(Stream *stream);
gcuError wait_for_device(Device *device);            /* the first failure of its streams */
gcuError may_wait(const char *call);                 /* refused within functions of a stream */
void wait_for_all_devices(void);
void advance(Stream *stream, int64_t cycles);
bool start_thread(void *(*function)(void *), void *argument);
void relax(int turn);                                /* one turn of a thread that spins */
extern int spin_turns;

/* ---- faults.c: signals of the processor while a kernel or a copy runs */
typedef struct Guard {
  sigjmp_buf jump;
  struct Guard *outer;
  volatile int signal;
  void *volatile address;
} Guard;
/* if (!sigsetjmp(guard->jump, 0)) { enter(guard); ...; leave(guard); } else { it was hit } */
void enter(Guard *guard);
void leave(Guard *guard);
void hit_outer(int signal, void *address);           /* ends the kernel that this is part of */
void catch_faults(void);
const char *fault_text(int signal, const void *address, char *text, size_t room);

/* ---- pool.c: the threads that kernels run on */
void divide_by_units(bool yes);       /* this thread runs a plan: it asks for units, not threads */
void tz_parallel_for(void (*function)(void *, int64_t), void *context, int64_t count,
                     int64_t most_threads);

/* ---- elf.c: object code in memory */
typedef struct Symbol { char *name; uintptr_t address; } Symbol; /* that others may see */
typedef struct Code {
  Object object;                      /* launches hold on to the code that they run */
  char *start;
  size_t size;
  uintptr_t constants, variables;     /* where they begin: code, constants, variables */
  size_t variables_size;
  Symbol *symbols;
  size_t symbol_count;
} Code;
gcuError load_object(const unsigned char *object, size_t size, Code **code);
uintptr_t symbol_address(const Code *code, const char *name); /* 0: there is none */

/* ---- module.c: functions of loaded images */
typedef struct Function {
  Object object;
  Code *code;                         /* a reference */
  void *handle;
  char *name, *symbol, *kinds;        /* kinds: of arguments, a letter each */
  char **calls;
  int argument_count, call_count;
  bool is_plan;
  int64_t scratchpad;
  uintptr_t entry;
} Function;

/* ---- image.c: images taken apart */
typedef struct Image {
  Function **functions;               /* each with one reference, and no code */
  size_t count;
  const unsigned char *object;
  size_t object_size;
} Image;
gcuError read_image(const void *bytes, size_t size, Image *image);
void drop_functions(Image *image);

/* ---- trace.c */
int64_t next_correlation(void);
int64_t current_tag(void);            /* of this thread */
bool is_tracing(void);
void trace(const gcuRecord *record, const char *name);

#endif
