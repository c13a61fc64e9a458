/* The part of the ACL runtime that is simulated: types, constants, and the switches for tests. */
#ifndef ACL_SIM_H
#define ACL_SIM_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_PARAM = 100000,       /* refused by the ACL layer, before the runtime sees it */
    RT_PARAM_INVALID = 107000,    /* refused by the runtime */
    RT_INVALID_DEVICE = 107001,
    RT_CONTEXT_NULL = 107002,
    RT_STREAM_CONTEXT = 107003,   /* the stream is another device's */
    RT_INVALID_HANDLE = 107017,
    RT_CAPTURE_MODE = 107030,     /* the call would break a graph that is being captured */
    RT_NOT_SUPPORT = 207000,
    RT_MEMORY_ALLOCATION = 207001,
    RT_STREAM_FAILED = 507011     /* a task has failed on the device */
};

enum { KIND_H2H, KIND_H2D, KIND_D2H, KIND_D2D, KIND_DEFAULT };
enum { LOCATION_HOST, LOCATION_DEVICE, LOCATION_UNREGISTERED, LOCATION_HOST_NUMA = 4 };
enum { REGISTER_MAPPED = 0x2, REGISTER_PINNED = 0x10000000 };

typedef struct { uint32_t id; int type; } location_t;
typedef struct { location_t destination, source; uint8_t reserved[16]; } batch_attributes_t;
typedef struct {
    location_t location;
    uint32_t page_size;
    uint32_t reserved[4];
} pointer_attributes_t;

/* memory.c: allocations and their owners */
int memory_add(void *address, size_t bytes, int type, int device, int owned);
int memory_remove(void *address, int type, int owned); /* frees what is owned */
location_t memory_find(const void *address);
int memory_holds(const void *address, size_t bytes); /* false: runs out of its allocation */
size_t memory_bytes(int type);
int memory_count(int type);

/* streams.c: FIFO threads and events */
typedef struct stream stream_t;
typedef struct { char *destination; const char *source; size_t bytes; } copy_t;
int stream_check(stream_t *stream, stream_t **found); /* NULL: the default stream */
int stream_push_copies(stream_t *stream, copy_t *copies, size_t count); /* takes the array */
int stream_push_fill(stream_t *stream, void *address, int value, size_t bytes);
int stream_drain(stream_t *stream);

/* context.c: the calling thread's device, and its last error */
int current_device(void); /* -1: no context */
int breaks_capture(void);
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define REQUIRE_CONTEXT()                                                                   \
    do {                                                                                    \
        if (current_device() < 0)                                                           \
            return fail(RT_CONTEXT_NULL, "%s: this thread has no context", __func__);       \
    } while (0)

#endif
