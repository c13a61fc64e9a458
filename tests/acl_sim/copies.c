/* The copy calls: their checks, and the work that they pass to a stream. */
#include "acl_sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t batch_calls, single_calls; /* that were accepted in whole or in part */
    uint64_t descriptors;               /* passed to streams by either */
    uint64_t largest_batch;             /* descriptors */
    uint64_t blocking;                  /* copies of memory that is not pinned */
} counts_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static counts_t counts;
static int batch_supported = 1;
static int64_t until_failure = -1; /* descriptors that still succeed; -1: all */
static int failure;

/* Whether the next descriptor to submit has to fail. */
static int take_failure(void) {
    pthread_mutex_lock(&lock);
    int code = SUCCESS;
    if (until_failure == 0) code = failure;
    if (until_failure >= 0) until_failure--;
    pthread_mutex_unlock(&lock);
    return code;
}

static void count(uint64_t *which, uint64_t number) {
    pthread_mutex_lock(&lock);
    *which += number;
    pthread_mutex_unlock(&lock);
}

static int on_device(const void *address) {
    return memory_find(address).type == LOCATION_DEVICE;
}

static int check_kind(const void *destination, const void *source, int kind) {
    int to_device = on_device(destination), from_device = on_device(source);
    static const int wants_to_device[] = {0, 1, 0, 1}, wants_from_device[] = {0, 0, 1, 1};
    if (kind == KIND_DEFAULT) return SUCCESS;
    if (kind < KIND_H2H || kind > KIND_D2D) return fail(RT_PARAM_INVALID, "kind %d", kind);
    if (to_device != wants_to_device[kind] || from_device != wants_from_device[kind])
        return fail(RT_PARAM_INVALID, "kind %d does not fit its addresses", kind);
    return SUCCESS;
}

/* The device's own check: an address range that leaves its allocation. */
static int leaves_memory(const void *destination, const void *source, size_t bytes) {
    return !memory_holds(destination, bytes) || !memory_holds(source, bytes);
}

static int pinned_or_device(const void *address) {
    return memory_find(address).type != LOCATION_UNREGISTERED;
}

/* Pass one checked copy to the stream; memory that is not pinned makes it wait and copy now. */
static int enqueue(stream_t *stream, void *destination, const void *source, size_t bytes) {
    if (leaves_memory(destination, source, bytes))
        return fail(RT_STREAM_FAILED, "%zu bytes leave their allocation", bytes);
    count(&counts.descriptors, 1);
    if (!pinned_or_device(destination) || !pinned_or_device(source)) {
        count(&counts.blocking, 1);
        int code = stream_drain(stream);
        if (code == SUCCESS) memcpy(destination, source, bytes);
        return code;
    }
    copy_t *copy = malloc(sizeof *copy);
    if (copy == NULL) return fail(RT_MEMORY_ALLOCATION, "no memory for a copy");
    *copy = (copy_t){destination, source, bytes};
    return stream_push_copies(stream, copy, 1);
}

EXPORT int aclrtMemcpyAsync(void *destination, size_t room, const void *source, size_t bytes,
                            int kind, stream_t *handle) {
    REQUIRE_CONTEXT();
    if (destination == NULL || source == NULL) return fail(INVALID_PARAM, "aclrtMemcpyAsync: NULL");
    if (bytes == 0 || room < bytes)
        return fail(RT_PARAM_INVALID, "aclrtMemcpyAsync: %zu bytes into %zu", bytes, room);
    stream_t *stream = NULL;
    int code = stream_check(handle, &stream);
    if (code == SUCCESS) code = check_kind(destination, source, kind);
    if (code == SUCCESS && (code = take_failure()) != SUCCESS) fail(code, "requested failure");
    if (code != SUCCESS) return code;
    count(&counts.single_calls, 1);
    return enqueue(stream, destination, source, bytes);
}

EXPORT int aclrtMemcpy(void *destination, size_t room, const void *source, size_t bytes, int kind) {
    REQUIRE_CONTEXT();
    if (destination == NULL || source == NULL || bytes == 0 || room < bytes)
        return fail(INVALID_PARAM, "aclrtMemcpy: %zu bytes into %zu", bytes, room);
    int code = check_kind(destination, source, kind);
    if (code == SUCCESS) memcpy(destination, source, bytes);
    return code;
}

EXPORT int aclrtMemset(void *address, size_t room, int32_t value, size_t bytes) {
    REQUIRE_CONTEXT();
    if (address == NULL || room < bytes)
        return fail(INVALID_PARAM, "aclrtMemset: %zu bytes into %zu", bytes, room);
    memset(address, value, bytes);
    return SUCCESS;
}

EXPORT int aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t bytes,
                            stream_t *handle) {
    REQUIRE_CONTEXT();
    if (address == NULL || room < bytes)
        return fail(INVALID_PARAM, "aclrtMemsetAsync: %zu bytes into %zu", bytes, room);
    stream_t *stream = NULL;
    int code = stream_check(handle, &stream);
    return code == SUCCESS ? stream_push_fill(stream, address, value, bytes) : code;
}

#ifndef ACL_SIM_WITHOUT_BATCH

/* A declared location must be the address's own; memory that is not pinned passes for host. */
static int check_location(const char *side, location_t declared, const void *address) {
    location_t actual = memory_find(address);
    int type = actual.type == LOCATION_UNREGISTERED ? LOCATION_HOST : actual.type;
    int wanted = declared.type == LOCATION_HOST_NUMA ? LOCATION_HOST : declared.type;
    if (type != wanted || (type == LOCATION_DEVICE && actual.id != declared.id))
        return fail(RT_PARAM_INVALID, "%s is of type %d on device %u, declared %d on %u", side,
                    type, actual.id, declared.type, declared.id);
    return SUCCESS;
}

static int check_entry(const void *destination, size_t room, const void *source, size_t bytes,
                       const batch_attributes_t *attributes) {
    if (bytes == 0 || bytes > room)
        return fail(RT_PARAM_INVALID, "%zu bytes into %zu", bytes, room);
    if (destination == NULL || source == NULL) return fail(RT_PARAM_INVALID, "NULL");
    int code = check_location("destination", attributes->destination, destination);
    if (code == SUCCESS) code = check_location("source", attributes->source, source);
    if (code == SUCCESS && on_device(destination) == on_device(source))
        code = fail(RT_PARAM_INVALID, "a batch goes from host to device or back");
    if (code == SUCCESS && (code = take_failure()) != SUCCESS) fail(code, "requested failure");
    return code;
}

/* The checks of the call as a whole, by the ACL layer. */
static int check_call(void **destinations, const size_t *rooms, void **sources, const size_t *sizes,
                      size_t number, const batch_attributes_t *attributes, const size_t *indexes,
                      size_t num_attributes) {
    static const uint8_t zero[16];
    if (!destinations || !rooms || !sources || !sizes || !attributes || !indexes)
        return fail(INVALID_PARAM, "aclrtMemcpyBatchAsync: NULL");
    if (number == 0) return fail(INVALID_PARAM, "aclrtMemcpyBatchAsync: no descriptor");
    for (size_t i = 0; i < number; i++)
        if (rooms[i] < sizes[i])
            return fail(INVALID_PARAM, "%zu bytes at index %zu into %zu", sizes[i], i, rooms[i]);
    for (size_t i = 0; i < num_attributes; i++)
        if (memcmp(attributes[i].reserved, zero, sizeof zero) != 0)
            return fail(INVALID_PARAM, "reserved bytes of attributes %zu are not zero", i);
    return SUCCESS;
}

static int check_attributes(const size_t *indexes, size_t num_attributes, size_t number) {
    if (num_attributes == 0 || num_attributes > number || indexes[0] != 0)
        return fail(RT_PARAM_INVALID, "%zu attributes", num_attributes);
    for (size_t i = 1; i < num_attributes; i++)
        if (indexes[i] <= indexes[i - 1] || indexes[i] >= number)
            return fail(RT_PARAM_INVALID, "attributes start at %zu", indexes[i]);
    return SUCCESS;
}

EXPORT int aclrtMemcpyBatchAsync(void **destinations, size_t *rooms, void **sources, size_t *sizes,
                                 size_t number, batch_attributes_t *attributes, size_t *indexes,
                                 size_t num_attributes, size_t *fail_index, stream_t *handle) {
    if (fail_index == NULL) return fail(INVALID_PARAM, "aclrtMemcpyBatchAsync: failIndex is NULL");
    int code = check_call(destinations, rooms, sources, sizes, number, attributes, indexes,
                          num_attributes);
    if (code != SUCCESS) return code;
    if (!batch_supported) return fail(RT_NOT_SUPPORT, "this chip has no batched copies");
    *fail_index = SIZE_MAX;
    REQUIRE_CONTEXT();
    stream_t *stream = NULL;
    if ((code = stream_check(handle, &stream)) != SUCCESS) return code;
    if ((code = check_attributes(indexes, num_attributes, number)) != SUCCESS) return code;
    copy_t *copies = malloc(number * sizeof *copies);
    if (copies == NULL) return fail(RT_MEMORY_ALLOCATION, "no memory for a batch");
    size_t num_copies = 0, which = 0, taken = 0;
    for (; taken < number && code == SUCCESS; taken++) {
        if (which + 1 < num_attributes && taken >= indexes[which + 1]) which++;
        void *destination = destinations[taken], *source = sources[taken];
        code = check_entry(destination, rooms[taken], source, sizes[taken], &attributes[which]);
        if (code != SUCCESS)
            *fail_index = taken;
        else if (!pinned_or_device(destination) || !pinned_or_device(source)
                 || leaves_memory(destination, source, sizes[taken]))
            code = enqueue(stream, destination, source, sizes[taken]);
        else
            copies[num_copies++] = (copy_t){destination, source, sizes[taken]};
    }
    /* Entries before the failed one are submitted. */
    pthread_mutex_lock(&lock);
    counts.batch_calls++;
    counts.descriptors += num_copies;
    if (number > counts.largest_batch) counts.largest_batch = number;
    pthread_mutex_unlock(&lock);
    if (num_copies == 0) {
        free(copies);
        return code;
    }
    int pushed = stream_push_copies(stream, copies, num_copies);
    return code == SUCCESS ? pushed : code;
}

#endif

/* For tests */

EXPORT void acl_sim_set_batch_supported(int supported) { batch_supported = supported; }

/* After `good` more descriptors, the next fails with `code` at submission; good < 0: none. */
EXPORT void acl_sim_fail_after(int64_t good, int code) {
    pthread_mutex_lock(&lock);
    until_failure = good;
    failure = code;
    pthread_mutex_unlock(&lock);
}

EXPORT void acl_sim_take_counts(counts_t *taken) {
    pthread_mutex_lock(&lock);
    *taken = counts;
    memset(&counts, 0, sizeof counts);
    pthread_mutex_unlock(&lock);
}
