/* Streams, each a FIFO with a thread of its own, and events. One lock guards them all; bytes move
 * outside it, and only when the stream gets there. */
#include "acl_sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct event {
    int references; /* the owner's, and one for every task that names it */
    uint64_t recorded, reached; /* records submitted, and records that a stream reached */
    int error;                  /* of the stream that reached the last one */
    struct event *next;
} event_t;

typedef struct task {
    enum { COPIES, FILL, RECORD, WAIT } kind;
    copy_t *copies;
    size_t count; /* of copies, or bytes to fill */
    void *address;
    int value;
    event_t *event;
    uint64_t record; /* the one to reach, or to wait for */
    struct task *next;
} task_t;

struct stream {
    int device, started, held, closing;
    int waits; /* for an event */
    int fails; /* the error that the next task will have */
    int error; /* the error that a task has had */
    unsigned delay; /* microseconds before each task */
    uint64_t pushed, finished;
    pthread_t thread;
    task_t *first, *last;
    struct stream *next;
};

enum { MAX_DEVICES = 8 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static stream_t *streams;
static event_t *events;
static stream_t *default_streams[MAX_DEVICES];
static unsigned delay_of_all;
static int waits_held; /* callers of aclrtStreamWaitEvent wait themselves, as in a slow call */

static void release(event_t *event) {
    if (--event->references == 0) free(event);
}

/* A batch has no order among its entries: here the last is copied first. */
static void run_copies(const task_t *task) {
    for (size_t i = task->count; i-- > 0;)
        memcpy(task->copies[i].destination, task->copies[i].source, task->copies[i].bytes);
}

static void run(stream_t *stream, task_t *task) {
    pthread_mutex_lock(&lock);
    if (stream->fails && task->kind != RECORD && task->kind != WAIT) {
        stream->error = stream->fails;
        stream->fails = SUCCESS;
    }
    int skips = stream->error != SUCCESS;
    pthread_mutex_unlock(&lock);
    if (task->kind == COPIES && !skips) run_copies(task);
    if (task->kind == FILL && !skips) memset(task->address, task->value, task->count);
    pthread_mutex_lock(&lock);
    while (task->kind == WAIT && task->event->reached < task->record) {
        stream->waits = 1;
        pthread_cond_broadcast(&moved);
        pthread_cond_wait(&moved, &lock);
        stream->waits = 0;
    }
    if (task->kind == RECORD) {
        if (task->record > task->event->reached) task->event->reached = task->record;
        task->event->error = stream->error;
    }
    if (task->event != NULL) release(task->event);
    stream->finished++;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    free(task->copies);
    free(task);
}

static void *serve(void *argument) {
    stream_t *stream = argument;
    for (;;) {
        pthread_mutex_lock(&lock);
        while ((stream->first == NULL && !stream->closing) || stream->held)
            pthread_cond_wait(&moved, &lock);
        task_t *task = stream->first;
        if (task != NULL) {
            stream->first = task->next;
            if (stream->first == NULL) stream->last = NULL;
        }
        unsigned delay = stream->delay > delay_of_all ? stream->delay : delay_of_all;
        pthread_mutex_unlock(&lock);
        if (task == NULL) return NULL;
        if (delay) usleep(delay);
        run(stream, task);
    }
}

static stream_t *make(int device) {
    stream_t *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return NULL;
    stream->device = device;
    stream->next = streams;
    streams = stream;
    return stream;
}

/* The lock is held. */
static int find(stream_t *handle, stream_t **found) {
    int device = current_device();
    if (handle == NULL) {
        if (default_streams[device] == NULL) default_streams[device] = make(device);
        *found = default_streams[device];
        return SUCCESS;
    }
    for (stream_t *stream = streams; stream != NULL; stream = stream->next) {
        if (stream != handle) continue;
        if (stream->device != device)
            return fail(RT_STREAM_CONTEXT, "the stream is of device %d, the thread of %d",
                        stream->device, device);
        *found = stream;
        return SUCCESS;
    }
    return fail(RT_INVALID_HANDLE, "%p is no stream", (void *)handle);
}

int stream_check(stream_t *handle, stream_t **found) {
    pthread_mutex_lock(&lock);
    int code = find(handle, found);
    pthread_mutex_unlock(&lock);
    return code;
}

/* The lock is held. */
static int push(stream_t *stream, task_t task) {
    task_t *kept = malloc(sizeof *kept);
    if (kept == NULL) return fail(RT_MEMORY_ALLOCATION, "no memory for a task");
    *kept = task;
    if (!stream->started) {
        if (pthread_create(&stream->thread, NULL, serve, stream) != 0) {
            free(kept);
            return fail(RT_MEMORY_ALLOCATION, "no thread for a stream");
        }
        stream->started = 1;
    }
    if (stream->last != NULL)
        stream->last->next = kept;
    else
        stream->first = kept;
    stream->last = kept;
    stream->pushed++;
    pthread_cond_broadcast(&moved);
    return SUCCESS;
}

int stream_push_copies(stream_t *stream, copy_t *copies, size_t count) {
    pthread_mutex_lock(&lock);
    int code = push(stream, (task_t){.kind = COPIES, .copies = copies, .count = count});
    pthread_mutex_unlock(&lock);
    return code;
}

int stream_push_fill(stream_t *stream, void *address, int value, size_t bytes) {
    pthread_mutex_lock(&lock);
    task_t task = {.kind = FILL, .address = address, .value = value, .count = bytes};
    int code = push(stream, task);
    pthread_mutex_unlock(&lock);
    return code;
}

/* The lock is held. Tasks that are pushed meanwhile are not waited for. */
static int drain(stream_t *stream) {
    uint64_t pushed = stream->pushed;
    while (stream->finished < pushed) pthread_cond_wait(&moved, &lock);
    return stream->error ? fail(stream->error, "a task of the stream has failed") : SUCCESS;
}

int stream_drain(stream_t *stream) {
    pthread_mutex_lock(&lock);
    int code = drain(stream);
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int aclrtCreateStreamWithConfig(stream_t **stream, uint32_t priority, uint32_t flags) {
    (void)priority, (void)flags;
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    *stream = make(current_device());
    pthread_mutex_unlock(&lock);
    return *stream ? SUCCESS : fail(RT_MEMORY_ALLOCATION, "no memory for a stream");
}

EXPORT int aclrtCreateStream(stream_t **stream) {
    return aclrtCreateStreamWithConfig(stream, 0, 0);
}

EXPORT int aclrtDestroyStream(stream_t *handle) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    stream_t *stream = NULL;
    int code = find(handle, &stream);
    if (code == SUCCESS) {
        drain(stream);
        stream->closing = 1;
        pthread_cond_broadcast(&moved);
        stream_t **link = &streams;
        while (*link != stream) link = &(*link)->next;
        *link = stream->next;
    }
    pthread_mutex_unlock(&lock);
    if (code != SUCCESS) return code;
    if (stream->started) pthread_join(stream->thread, NULL);
    free(stream);
    return SUCCESS;
}

EXPORT int aclrtDestroyStreamForce(stream_t *handle) { return aclrtDestroyStream(handle); }

EXPORT int aclrtSynchronizeStream(stream_t *handle) {
    REQUIRE_CONTEXT();
    stream_t *stream = NULL;
    int code = stream_check(handle, &stream);
    return code == SUCCESS ? stream_drain(stream) : code;
}

EXPORT int aclrtSynchronizeStreamWithTimeout(stream_t *handle, int32_t milliseconds) {
    (void)milliseconds;
    return aclrtSynchronizeStream(handle);
}

EXPORT int aclrtSynchronizeDevice(void) {
    REQUIRE_CONTEXT();
    int code = SUCCESS;
    pthread_mutex_lock(&lock);
    for (stream_t *stream = streams; stream != NULL; stream = stream->next) {
        int ended = stream->device == current_device() ? drain(stream) : SUCCESS;
        if (ended != SUCCESS) code = ended;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    (void)milliseconds;
    return aclrtSynchronizeDevice();
}

EXPORT int aclrtStreamQuery(stream_t *handle, int *status) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    stream_t *stream = NULL;
    int code = find(handle, &stream);
    if (code == SUCCESS) *status = stream->finished < stream->pushed; /* 0: complete */
    pthread_mutex_unlock(&lock);
    return code;
}

/* Events */

EXPORT int aclrtCreateEventExWithFlag(event_t **event, uint32_t flags) {
    (void)flags;
    REQUIRE_CONTEXT();
    *event = calloc(1, sizeof **event);
    if (*event == NULL) return fail(RT_MEMORY_ALLOCATION, "no memory for an event");
    pthread_mutex_lock(&lock);
    (*event)->references = 1;
    (*event)->next = events;
    events = *event;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT int aclrtCreateEventWithFlag(event_t **event, uint32_t flags) {
    return aclrtCreateEventExWithFlag(event, flags);
}

/* The lock is held. */
static int find_event(event_t *handle) {
    for (event_t *event = events; event != NULL; event = event->next)
        if (event == handle) return SUCCESS;
    return fail(RT_INVALID_HANDLE, "%p is no event", (void *)handle);
}

EXPORT int aclrtDestroyEvent(event_t *event) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    int code = find_event(event);
    if (code == SUCCESS) {
        event_t **link = &events;
        while (*link != event) link = &(*link)->next;
        *link = event->next;
        release(event);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int push_event(event_t *event, stream_t *handle, int kind) {
    pthread_mutex_lock(&lock);
    stream_t *stream = NULL;
    int code = find_event(event);
    if (code == SUCCESS) code = find(handle, &stream);
    if (code == SUCCESS) {
        if (kind == RECORD) event->recorded++;
        event->references++;
        task_t task = {.kind = kind, .event = event, .record = event->recorded};
        code = push(stream, task);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int aclrtRecordEvent(event_t *event, stream_t *stream) {
    REQUIRE_CONTEXT();
    return push_event(event, stream, RECORD);
}

/* Waits for the last record so far; without a record, for nothing. */
EXPORT int aclrtStreamWaitEvent(stream_t *stream, event_t *event) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    while (waits_held) pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return push_event(event, stream, WAIT);
}

EXPORT int aclrtResetEvent(event_t *event, stream_t *stream) {
    (void)stream;
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    int code = find_event(event);
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int aclrtQueryEventStatus(event_t *event, int *status) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    int code = find_event(event);
    if (code == SUCCESS) {
        *status = event->reached >= event->recorded; /* 1: complete */
        if (*status && event->error)
            code = fail(event->error, "a task before the event has failed");
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int aclrtQueryEventWaitStatus(event_t *event, int *status) {
    int complete = 0;
    int code = aclrtQueryEventStatus(event, &complete);
    *status = !complete;
    return code;
}

EXPORT int aclrtSynchronizeEvent(event_t *event) {
    REQUIRE_CONTEXT();
    pthread_mutex_lock(&lock);
    int code = find_event(event);
    if (code == SUCCESS) {
        uint64_t wanted = event->recorded;
        event->references++;
        while (event->reached < wanted) pthread_cond_wait(&moved, &lock);
        if (event->error) code = fail(event->error, "a task before the event has failed");
        release(event);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int aclrtEventElapsedTime(float *milliseconds, event_t *start, event_t *end) {
    (void)start, (void)end;
    *milliseconds = 0;
    return SUCCESS;
}

/* For tests. A stream that does not exist is ignored. */

static void set(stream_t *handle, void (*change)(stream_t *, int), int value) {
    pthread_mutex_lock(&lock);
    for (stream_t *stream = streams; stream != NULL; stream = stream->next)
        if (stream == handle) change(stream, value);
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static void change_held(stream_t *stream, int value) { stream->held = value; }
static void change_delay(stream_t *stream, int value) { stream->delay = (unsigned)value; }
static void change_fails(stream_t *stream, int value) {
    stream->fails = value;
    if (value == SUCCESS) stream->error = SUCCESS;
}

/* A held stream starts no task. */
EXPORT void acl_sim_hold(stream_t *stream) { set(stream, change_held, 1); }
EXPORT void acl_sim_release(stream_t *stream) { set(stream, change_held, 0); }
EXPORT void acl_sim_delay(stream_t *stream, int microseconds) {
    set(stream, change_delay, microseconds);
}
/* The next copy or fill fails when the stream reaches it; 0 cancels the failure. */
EXPORT void acl_sim_fail_stream(stream_t *stream, int code) { set(stream, change_fails, code); }

EXPORT void acl_sim_hold_waits(int held) {
    pthread_mutex_lock(&lock);
    waits_held = held;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

EXPORT void acl_sim_delay_all(int microseconds) {
    pthread_mutex_lock(&lock);
    delay_of_all = (unsigned)microseconds;
    pthread_mutex_unlock(&lock);
}

EXPORT int acl_sim_num_events(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (event_t *event = events; event != NULL; event = event->next) count++;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Return when the stream has reached a wait for an event, or its end. */
EXPORT void acl_sim_settle(stream_t *handle) {
    pthread_mutex_lock(&lock);
    for (stream_t *stream = streams; stream != NULL; stream = stream->next)
        while (stream == handle && !stream->waits && stream->finished < stream->pushed)
            pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

/* Tasks that the stream has not finished; -1 for a stream that does not exist. */
EXPORT int acl_sim_num_tasks(stream_t *handle) {
    int count = -1;
    pthread_mutex_lock(&lock);
    for (stream_t *stream = streams; stream != NULL; stream = stream->next)
        if (stream == handle) count = (int)(stream->pushed - stream->finished);
    pthread_mutex_unlock(&lock);
    return count;
}
