/* The runtime library of a virtual chip, as a vendor's would be: memory, modules, streams, events.

   Kernels run natively, so results are exact; the time they take is modelled from the description
   of the chip and from what they counted, so times are the same on every machine. Nothing here
   ends the process: whatever goes wrong is an error code, and gcuGetLastErrorMessage says in words
   what was wrong with this call. All functions may be called from any thread. */
#ifndef GCU_RUNTIME_H
#define GCU_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

typedef enum gcuError {
  gcuSuccess = 0,
  gcuErrorInvalidValue = 1,       /* an argument that makes no sense */
  gcuErrorOutOfMemory = 2,
  gcuErrorInvalidDevice = 3,      /* no device of that number */
  gcuErrorInvalidPointer = 4,     /* no live memory of the device: a host's, freed, or beyond */
  gcuErrorInvalidDirection = 5,   /* a copy whose pointers do not lie where its kind says */
  gcuErrorInvalidHandle = 6,      /* a module, function, stream or event that is not (or no more) */
  gcuErrorInvalidImage = 7,       /* damaged, of another version, or for another chip */
  gcuErrorNotFound = 8,           /* no function or variable of that name */
  gcuErrorInvalidGrid = 9,        /* a grid that the chip does not accept */
  gcuErrorScratchpad = 10,        /* a kernel that wants more local memory than a unit has */
  gcuErrorNotReady = 11,          /* work is still under way: no failure */
  gcuErrorIllegalAddress = 12,    /* a kernel touched memory that is not there */
  gcuErrorPeerAccess = 13,
  gcuErrorInitialization = 14,    /* no description, too late for another one, or after fork() */
  gcuErrorLaunchFailure = 15      /* a kernel did what the processor refuses: divided by zero */
} gcuError;

typedef enum gcuMemcpyKind {
  gcuMemcpyHostToHost = 0,
  gcuMemcpyHostToDevice = 1,
  gcuMemcpyDeviceToHost = 2,
  gcuMemcpyDeviceToDevice = 3,
  gcuMemcpyDefault = 4            /* by where the pointers lie */
} gcuMemcpyKind;

/* What the chip is: given once, before anything else is called (gcuConfigure), and the same for
   all devices. The model of time reads nothing but this and what kernels count. */
typedef struct gcuDescription {
  uint32_t size;                  /* of this struct, which grows at its end */
  char name[32];                  /* "gcu" */
  int32_t devices;                /* before GCU_VISIBLE_DEVICES, which is a list of numbers */
  int32_t capability[2];
  int32_t units;                  /* programs that run at the same time */
  int32_t warps;                  /* of a program, whatever is asked for */
  int32_t free_grid;              /* a grid up to this is always accepted; 0: any grid is */
  int32_t grid_multiple;          /* a larger one must be a multiple of this */
  int32_t vector_bits;
  int64_t clock_khz;
  int64_t memory_bytes;           /* of a device */
  int64_t scratchpad_bytes;       /* of a unit */
  int64_t memory_bytes_per_cycle; /* main memory, shared by the units that run */
  int64_t unit_bytes_per_cycle;   /* the most that one unit's DMA moves of it */
  int64_t scratchpad_bytes_per_cycle; /* of one unit */
  int64_t dma_latency;            /* cycles before the first byte of a transfer */
  int64_t dma_in_flight;          /* transfers under way at once: double buffering is 2 */
  int64_t launch_cycles;          /* from one kernel to the next of a stream */
  int64_t wave_cycles;            /* a unit taking up its next program */
  int64_t link_bytes_per_cycle;   /* to the host, and to other devices */
  int64_t link_latency;           /* cycles */
  uint8_t fingerprint[32];        /* of all that shapes code: images for others are refused */
} gcuDescription;

/* What a program counts while it runs, in this order. Cycles are whole numbers. */
enum {
  GCU_COUNT_VECTOR = 0,           /* cycles of the vector unit */
  GCU_COUNT_MATRIX = 1,           /* cycles of the matrix unit */
  GCU_COUNT_SCALAR = 2,           /* cycles of control: addresses, loops, branches */
  GCU_COUNT_LOAD = 3,             /* bytes from main memory */
  GCU_COUNT_STORE = 4,            /* bytes to main memory */
  GCU_COUNT_LOCAL = 5,            /* bytes from and to the scratchpad */
  GCU_COUNT_TRANSFERS = 6,        /* transfers by DMA */
  GCU_COUNT_LAUNCHES = 7,         /* of a kernel in a plan: how often it was called */
  GCU_COUNTERS = 8
};

typedef struct gcuDeviceProperties {
  gcuDescription description;
  char name[64];                  /* for people */
  int32_t device;
} gcuDeviceProperties;

typedef struct gcuMemoryInfo { int64_t allocated, peak, free, total, allocations; } gcuMemoryInfo;

typedef struct gcuModule_st *gcuModule_t;
typedef struct gcuFunction_st *gcuFunction_t;
typedef struct gcuStream_st *gcuStream_t;     /* NULL: the default stream of the current device */
typedef struct gcuEvent_st *gcuEvent_t;

typedef struct gcuFunctionInfo {
  int32_t arguments;              /* 64-bit words that a launch passes */
  int32_t is_plan;                /* launched by gcuLaunchPlan */
  int32_t calls;                  /* kernels of a plan; else 1 */
  int64_t scratchpad_bytes;
} gcuFunctionInfo;

/* ---- the chip, errors, devices */
gcuError gcuConfigure(const gcuDescription *description); /* again with the same one: nothing */
gcuError gcuGetLastError(void);               /* of this thread; forgets it */
gcuError gcuPeekAtLastError(void);
const char *gcuGetErrorName(gcuError error);
const char *gcuGetErrorString(gcuError error);
const char *gcuGetLastErrorMessage(void);     /* of this thread, in words, with the numbers */
gcuError gcuGetDeviceCount(int *count);
gcuError gcuSetDevice(int device);            /* of this thread */
gcuError gcuGetDevice(int *device);
gcuError gcuGetDeviceCapability(int *major, int *minor, int device);
gcuError gcuGetDeviceProperties(gcuDeviceProperties *properties, int device);
gcuError gcuDeviceSynchronize(void);
gcuError gcuDeviceReset(void);                /* frees everything of the current device */
gcuError gcuSetHostThreads(int threads);      /* that kernels run on; 0: a thread for each core */

/* ---- memory: addresses of a range that is the devices' alone

   A pointer may be freed, and looked up, whichever device is the current one; copies and launches
   take those of their stream's device. gcuMemcpyDefault copies between any two places. Pinned
   memory is copied while the caller goes on; of other memory of the host, gcuMemcpyAsync is done
   with it when it returns. What waits must not be called by a function of a stream. */
gcuError gcuMalloc(void **pointer, size_t size);          /* size 0: a NULL pointer */
gcuError gcuFree(void *pointer);                          /* waits for the device; NULL: nothing */
gcuError gcuMemcpy(void *target, const void *source, size_t size, gcuMemcpyKind kind);
gcuError gcuMemcpyAsync(void *target, const void *source, size_t size, gcuMemcpyKind kind,
                        gcuStream_t stream);
gcuError gcuMemcpyPeer(void *target, int target_device, const void *source, int source_device,
                       size_t size);
gcuError gcuMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                            size_t size, gcuStream_t stream);
gcuError gcuMemset(void *pointer, int value, size_t size);
gcuError gcuMemsetAsync(void *pointer, int value, size_t size, gcuStream_t stream);
gcuError gcuMemGetInfo(gcuMemoryInfo *info, int device);
gcuError gcuPointerGetDevice(int *device, const void *pointer); /* -1: memory of the host */
gcuError gcuHostAlloc(void **pointer, size_t size);       /* pinned memory of the host */
gcuError gcuHostFree(void *pointer);
gcuError gcuHostIsPinned(int *pinned, const void *pointer);

/* ---- modules, which are for all devices; variables count as memory of each */
gcuError gcuModuleLoadData(gcuModule_t *module, const void *image, size_t size);
gcuError gcuModuleUnload(gcuModule_t module);
gcuError gcuModuleGetFunction(gcuFunction_t *function, gcuModule_t module, const char *name);
gcuError gcuModuleGetGlobal(void **address, gcuModule_t module, const char *name);
gcuError gcuFunctionGetInfo(gcuFunctionInfo *info, gcuFunction_t function);
uint64_t gcuImageChecksum(const void *bytes, size_t size); /* FNV-1a, for those who write images */

/* ---- launches, which return at once; a failing kernel fails its stream's next calls

   gcuLaunchKernel refuses grids that the chip does not accept:
   "Invalid grid size 57 (must be <= 48 or multiple of 48)". `arguments` are 64-bit words:
   addresses, integers, the bits of floats. gcuLaunchFolded takes any grid of programs and runs it
   on the largest number of them that the chip accepts, each of which goes on to further ones. */
gcuError gcuLaunchKernel(gcuFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         const int64_t *arguments, int count, gcuStream_t stream);
gcuError gcuLaunchFolded(gcuFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         const int64_t *arguments, int count, gcuStream_t stream);
/* A plan is a list of kernels that our compiler wrote as one function: slots are addresses of
   inputs and outputs and then sizes. */
gcuError gcuLaunchPlan(gcuFunction_t function, const int64_t *slots, int count, void *arena,
                       gcuStream_t stream);
/* A function of the host's in the order of the stream. */
gcuError gcuLaunchHostFunction(gcuStream_t stream, void (*function)(void *), void *data);

/* ---- streams and events */
gcuError gcuStreamCreate(gcuStream_t *stream);
gcuError gcuStreamCreateWithPriority(gcuStream_t *stream, int priority);
gcuError gcuStreamDestroy(gcuStream_t stream);
gcuError gcuStreamSynchronize(gcuStream_t stream);
gcuError gcuStreamQuery(gcuStream_t stream);
gcuError gcuStreamWaitEvent(gcuStream_t stream, gcuEvent_t event);
gcuError gcuStreamGetCycles(int64_t *cycles, gcuStream_t stream); /* waits; modelled, since 0 */
gcuError gcuEventCreate(gcuEvent_t *event);
gcuError gcuEventDestroy(gcuEvent_t event);
gcuError gcuEventRecord(gcuEvent_t event, gcuStream_t stream);
gcuError gcuEventQuery(gcuEvent_t event);
gcuError gcuEventSynchronize(gcuEvent_t event);
gcuError gcuEventElapsedTime(float *milliseconds, gcuEvent_t start, gcuEvent_t end); /* modelled */
gcuError gcuEventElapsedCycles(int64_t *cycles, gcuEvent_t start, gcuEvent_t end);

/* ---- what was run, for profilers: kept while tracing is on */
typedef enum gcuRecordKind {
  gcuRecordKernel = 0,
  gcuRecordCopy = 1,
  gcuRecordSet = 2
} gcuRecordKind;
typedef struct gcuRecord {
  char name[128];
  int32_t kind, device;
  int64_t stream;                 /* a number, in the order in which streams were made */
  int64_t start, cycles;          /* on the modelled clock of the stream */
  int64_t programs, units;        /* how many ran, on how many at once */
  int64_t bytes;                  /* of a copy */
  int64_t correlation;            /* a number that grows with each launch, from 1 on */
  int64_t tag;                    /* that the thread had when it launched it */
  int64_t counts[GCU_COUNTERS];   /* of all programs together */
} gcuRecord;
gcuError gcuTraceStart(void);
gcuError gcuTraceStop(void);
gcuError gcuTraceTag(int64_t tag);  /* of this thread, for what it launches from now on; 0: none */
gcuError gcuTraceRead(gcuRecord *records, int room, int *count); /* takes the oldest away */

/* ---- the model of time by itself: how many cycles a launch of `programs` programs takes that
   counted `counts` (GCU_COUNTERS for each), on `at_once` of the grid's programs at a time */
int64_t gcuModelCycles(const gcuDescription *chip, const int64_t *counts, int64_t programs,
                       int64_t at_once);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
