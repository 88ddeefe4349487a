/* Errors: a code for the caller, and words for people, of each thread. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local gcuError last_error = gcuSuccess;
static _Thread_local char last_message[512];

static const struct { const char *name, *text; } errors[] = {
  [gcuSuccess] = {"gcuSuccess", "no error"},
  [gcuErrorInvalidValue] = {"gcuErrorInvalidValue", "an argument makes no sense"},
  [gcuErrorOutOfMemory] = {"gcuErrorOutOfMemory", "out of memory"},
  [gcuErrorInvalidDevice] = {"gcuErrorInvalidDevice", "there is no device of that number"},
  [gcuErrorInvalidPointer] = {"gcuErrorInvalidPointer", "this is no live memory of the device"},
  [gcuErrorInvalidDirection] = {"gcuErrorInvalidDirection",
                                "the pointers of a copy do not lie where its kind says"},
  [gcuErrorInvalidHandle] = {"gcuErrorInvalidHandle",
                             "this is not, or no more, a handle of that kind"},
  [gcuErrorInvalidImage] = {"gcuErrorInvalidImage",
                            "an image is damaged, of another version, or for another chip"},
  [gcuErrorNotFound] = {"gcuErrorNotFound", "nothing of that name is there"},
  [gcuErrorInvalidGrid] = {"gcuErrorInvalidGrid", "the chip does not accept a grid of this size"},
  [gcuErrorScratchpad] = {"gcuErrorScratchpad",
                          "a kernel wants more scratchpad than a unit has"},
  [gcuErrorNotReady] = {"gcuErrorNotReady", "work is still under way"},
  [gcuErrorIllegalAddress] = {"gcuErrorIllegalAddress",
                              "a kernel touched memory that is not there"},
  [gcuErrorPeerAccess] = {"gcuErrorPeerAccess",
                          "a copy between devices was not asked for as one"},
  [gcuErrorInitialization] = {"gcuErrorInitialization", "the chip cannot be used in this process"},
  [gcuErrorLaunchFailure] = {"gcuErrorLaunchFailure",
                             "a kernel did what the processor refuses"},
};

static bool is_known(gcuError error) {
  return error >= 0 && (size_t)error < sizeof errors / sizeof errors[0];
}

gcuError fail(gcuError code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_message, sizeof last_message, format, arguments);
  va_end(arguments);
  last_error = code;
  return code;
}

gcuError out_of_host_memory(size_t size) {
  return fail(gcuErrorOutOfMemory, "the host has no %zu bytes left", size);
}

gcuError gcuGetLastError(void) {
  gcuError error = last_error;
  last_error = gcuSuccess;
  return error;
}

gcuError gcuPeekAtLastError(void) { return last_error; }

const char *gcuGetErrorName(gcuError error) {
  return is_known(error) ? errors[error].name : "unknown error";
}

const char *gcuGetErrorString(gcuError error) {
  return is_known(error) ? errors[error].text : "unknown error";
}

const char *gcuGetLastErrorMessage(void) {
  return last_message[0] ? last_message : errors[gcuSuccess].text;
}
