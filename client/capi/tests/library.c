/* Calls the library as a C program does. Argument: the endpoint of a node, or none: then only its absence is tested. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tidepool.h"

#define CHECK(truth)                                                                                       \
    do {                                                                                                   \
        if (!(truth)) {                                                                                    \
            fprintf(stderr, "%s:%d: %s (%s: %s)\n", __FILE__, __LINE__, #truth, tidepool_error_reason(), \
                    tidepool_error_message());                                                             \
            exit(1);                                                                                       \
        }                                                                                                  \
    } while (0)

static int ended(transfer_engine_t engine, batch_id_t batch, size_t task) {
    transfer_status_t status;
    for (int turn = 0; turn < 20000; turn++) {
        CHECK(getTransferStatus(engine, batch, task, &status) == 0);
        if (status.status != STATUS_PENDING) return status.status;
        usleep(1000);
    }
    return STATUS_PENDING;
}

static void engines(void) {
    CHECK(createTransferEngine("etcd://nowhere", "127.0.0.1", "", 0, 1) == NULL);
    CHECK(createTransferEngine(NULL, NULL, NULL, 0, 1) == NULL);
    transfer_engine_t here = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "", 0, 1);
    transfer_engine_t there = createTransferEngine("P2PHANDSHAKE", "127.0.0.1:0", NULL, 0, 1);
    CHECK(here && there);
    char name[64], small[4];
    CHECK(getLocalIpAndPort(there, small, sizeof small) == -1);
    CHECK(getLocalIpAndPort(there, name, sizeof name) == 0);
    CHECK(openSegment(here, "nowhere") < 0);
    segment_id_t segment = openSegment(here, name);
    CHECK(segment > 0 && openSegment(here, name) == segment);

    static char source[1 << 20], target[1 << 20];
    for (size_t at = 0; at < sizeof source; at++) source[at] = (char)(at * 31 % 251);
    CHECK(registerLocalMemory(here, NULL, 10, "*", 1) == -1);
    CHECK(registerLocalMemory(here, source, sizeof source, "*", 1) == 0);
    CHECK(registerLocalMemory(here, source + 8, 8, "*", 1) == -7);
    CHECK(registerLocalMemory(there, target, sizeof target, "*", 1) == 0);

    batch_id_t batch = allocateBatchID(here, 4);
    CHECK(batch != INVALID_BATCH);
    transfer_request_t requests[3] = {
        {OPCODE_WRITE, source, segment, (uint64_t)(uintptr_t)target, sizeof source},
        {OPCODE_WRITE, source, segment, (uint64_t)(uintptr_t)target, 0},
        {OPCODE_READ, source + 100, segment, (uint64_t)(uintptr_t)target, 50},
    };
    CHECK(submitTransfer(here, batch, requests, 2) == 0);
    CHECK(ended(here, batch, 0) == STATUS_COMPLETED && ended(here, batch, 1) == STATUS_COMPLETED);
    CHECK(memcmp(source, target, sizeof source) == 0);
    notify_msg_t message = {(char *)"name", (char *)"message"};
    CHECK(submitTransferWithNotify(here, batch, requests + 2, 1, message) == 0);
    CHECK(ended(here, batch, 2) == STATUS_COMPLETED);
    CHECK(memcmp(source + 100, target, 50) == 0);
    CHECK(submitTransfer(here, batch, requests, 2) == -1); /* more than the batch was made for */
    transfer_status_t status;
    CHECK(getTransferStatus(here, batch, 99, &status) == -1 && status.status == STATUS_INVALID);
    CHECK(freeBatchID(here, batch) == 0 && freeBatchID(here, batch) == -1);

    requests[0].target_offset = 4096;
    batch = allocateBatchID(here, 1);
    CHECK(submitTransfer(here, batch, requests, 1) == -1); /* not registered there */
    requests[0].target_id = 7;
    CHECK(submitTransfer(here, batch, requests, 1) == -1); /* no such segment */

    CHECK(genNotifyInEngine(here, (uint64_t)segment, message) == 0);
    CHECK(genNotifyInEngine(here, 99, message) == -1);
    int told = 0;
    for (int turn = 0; told < 2 && turn < 20000; turn++) {
        int count = 0;
        notify_msg_t *messages = getNotifsFromEngine(there, &count);
        for (int at = 0; at < count; at++)
            CHECK(strcmp(messages[at].name, "name") == 0 && strcmp(messages[at].msg, "message") == 0);
        CHECK(freeNotifsMsgBuf(messages, count) == 0);
        told += count;
        usleep(1000);
    }
    CHECK(told == 2);
    CHECK(unregisterLocalMemory(here, source) == 0 && unregisterLocalMemory(here, source) == -3);
    CHECK(closeSegment(here, segment) == 0);
    destroyTransferEngine(here);
    destroyTransferEngine(there);
    destroyTransferEngine(NULL);
    CHECK(registerLocalMemory(NULL, source, 8, "*", 1) == -1);
    CHECK(allocateBatchID(NULL, 1) == INVALID_BATCH);
}

static void no_store(void) {
    tidepool_store *store = NULL;
    CHECK(tidepool_connect("127.0.0.1:1", NULL, 500, &store) < 0 && store == NULL);
    CHECK(strlen(tidepool_error_reason()) > 0 && strlen(tidepool_error_message()) > 0);
    CHECK(tidepool_connect("nowhere", NULL, 0, &store) == TIDEPOOL_INVALID);
    CHECK(strcmp(tidepool_error_reason(), "BAD_ENDPOINT") == 0);
    CHECK(tidepool_connect(NULL, NULL, 1, NULL) == TIDEPOOL_INVALID);
    CHECK(tidepool_put(NULL, "k", 1, "v", 1, 0) == TIDEPOOL_INVALID);
    CHECK(tidepool_exists(NULL, "k", 1) == TIDEPOOL_INVALID);
    CHECK(tidepool_get(NULL, NULL, 1, NULL, 0) == TIDEPOOL_INVALID);
    tidepool_close(NULL);
}

static void batches(tidepool_store *store) {
    static char value[300000], read[3][300000];
    for (size_t at = 0; at < sizeof value; at++) value[at] = (char)(at * 11 % 249);
    tidepool_slice keys[3] = {{"batch/0", 7}, {"batch/1", 7}, {"batch/2", 7}};
    tidepool_slice values[2] = {{value, sizeof value}, {value, 0}};
    tidepool_room rooms[3] = {{read[0], sizeof read[0]}, {NULL, 0}, {read[2], sizeof read[2]}};
    int32_t results[3] = {9, 9, 9};
    int64_t lengths[3] = {9, 9, 9};
    CHECK(tidepool_put_batch(store, 2, keys, values, 0, results) == 0);
    CHECK(results[0] == 1 && results[1] == 1 && results[2] == 9);
    CHECK(tidepool_put_batch(store, 1, keys + 1, values, 0, results) == 0 && results[0] == 0);
    CHECK(tidepool_exists_batch(store, 3, keys, results) == 0);
    CHECK(results[0] == 1 && results[1] == 1 && results[2] == 0);
    CHECK(tidepool_get_batch(store, 3, keys, rooms, lengths) == 0);
    CHECK(lengths[0] == (int64_t)sizeof value && lengths[1] == 0 && lengths[2] == TIDEPOOL_MISSING);
    CHECK(memcmp(read[0], value, sizeof value) == 0);
    rooms[0].length = 10;
    CHECK(tidepool_get_batch(store, 2, keys, rooms, lengths) == 0);
    CHECK(lengths[0] == TIDEPOOL_INVALID && lengths[1] == 0);
    CHECK(tidepool_remove_batch(store, 3, keys, 0, results) == 0);
    CHECK(results[0] == 1 && results[1] == 1 && results[2] == 0);
    CHECK(tidepool_exists_batch(store, 0, NULL, NULL) == 0);
    CHECK(tidepool_exists_batch(store, 1, NULL, results) == TIDEPOOL_INVALID);
    CHECK(tidepool_exists_batch(store, 1, keys, NULL) == TIDEPOOL_INVALID);
    keys[0].start = NULL;
    CHECK(tidepool_put_batch(store, 2, keys, values, 0, results) == TIDEPOOL_INVALID);
}

static void streams(tidepool_store *store) {
    enum { LENGTH = 5000000, PIECE = 777777 };
    static char value[LENGTH], read[LENGTH];
    for (size_t at = 0; at < LENGTH; at++) value[at] = (char)(at * 13 % 251);
    tidepool_writer *writer = NULL;
    CHECK(tidepool_write_begin(store, "stream", 6, LENGTH, 0, &writer) == 0);
    for (size_t at = 0; at < LENGTH; at += PIECE)
        CHECK(tidepool_write(writer, value + at, LENGTH - at < PIECE ? LENGTH - at : PIECE) == 0);
    CHECK(tidepool_write_end(writer) == 1);

    tidepool_reader *reader = NULL;
    CHECK(tidepool_read_begin(store, "stream", 6, 0, UINT64_MAX, &reader) == LENGTH);
    size_t have = 0;
    for (int64_t came; (came = tidepool_read(reader, read + have, PIECE)) != 0; have += (size_t)came) CHECK(came > 0);
    CHECK(have == LENGTH && memcmp(read, value, LENGTH) == 0);
    CHECK(tidepool_read(reader, read, PIECE) <= 0); /* the end stays the end, or says that it was */
    tidepool_read_end(reader);
    CHECK(tidepool_read_begin(store, "stream", 6, 100, 50, &reader) == 50);
    CHECK(tidepool_read(reader, read, PIECE) == 50 && memcmp(read, value + 100, 50) == 0);
    tidepool_read_end(reader); /* before its end */
    CHECK(tidepool_read_begin(store, "none", 4, 0, UINT64_MAX, &reader) == TIDEPOOL_MISSING);
    CHECK(tidepool_read_begin(store, "stream", 6, LENGTH + 1, 1, &reader) == TIDEPOOL_INVALID);

    CHECK(tidepool_write_begin(store, "short", 5, 10, 0, &writer) == 0);
    CHECK(tidepool_write(writer, value, 9) == 0);
    CHECK(tidepool_write_end(writer) < 0); /* one byte is missing */
    CHECK(tidepool_write_begin(store, "given up", 8, 10, 0, &writer) == 0);
    CHECK(tidepool_write(writer, value, 10) == 0);
    tidepool_write_abandon(writer);
    CHECK(tidepool_write_begin(store, "none", 4, 0, 0, &writer) == 0);
    tidepool_write_abandon(writer);
    CHECK(tidepool_write_begin(store, "empty", 5, 0, 0, &writer) == 0);
    CHECK(tidepool_exists(store, "empty", 5) == 0);
    CHECK(tidepool_write_end(writer) == 1 && tidepool_length(store, "empty", 5) == 0);
    CHECK(tidepool_write_begin(store, "long", 4, 2, 0, &writer) == 0);
    CHECK(tidepool_write(writer, value, 3) == 0);
    CHECK(tidepool_write_end(writer) < 0); /* one byte too many */
    CHECK(tidepool_exists(store, "none", 4) == 0 && tidepool_exists(store, "long", 4) == 0);
    CHECK(tidepool_exists(store, "short", 5) == 0 && tidepool_exists(store, "given up", 8) == 0);
    /* The node says so long before all came; the rest goes nowhere. */
    CHECK(tidepool_write_begin(store, "stream", 6, 8 * LENGTH, 0, &writer) == 0);
    for (int turn = 0; turn < 8; turn++) CHECK(tidepool_write(writer, value, LENGTH) == 0);
    CHECK(tidepool_write_end(writer) == 0 && tidepool_length(store, "stream", 6) == LENGTH);
    CHECK(tidepool_remove(store, "stream", 6, 0) == 1);
    CHECK(tidepool_read_begin(NULL, "k", 1, 0, 1, &reader) == TIDEPOOL_INVALID);
    CHECK(tidepool_write_begin(store, "k", 1, 1, 64, &writer) == TIDEPOOL_INVALID);
    CHECK(tidepool_write_end(NULL) == TIDEPOOL_INVALID && tidepool_write(NULL, "v", 1) == TIDEPOOL_INVALID);
    tidepool_read_end(NULL);
    tidepool_write_abandon(NULL);
}

static void objects(const char *endpoint) {
    tidepool_store *store = NULL;
    CHECK(tidepool_connect(endpoint, NULL, 20000, &store) == 0);
    char key[64];
    int length = snprintf(key, sizeof key, "c/%d", (int)getpid());
    static char value[3 << 20], read[3 << 20];
    for (size_t at = 0; at < sizeof value; at++) value[at] = (char)(at * 7 % 253);
    CHECK(tidepool_exists(store, key, length) == 0);
    CHECK(tidepool_get(store, key, length, read, sizeof read) == TIDEPOOL_MISSING);
    CHECK(tidepool_length(store, key, length) == TIDEPOOL_MISSING);
    CHECK(tidepool_put(store, key, length, value, sizeof value, 0) == 1);
    CHECK(tidepool_put(store, key, length, "other", 5, 0) == 0);
    CHECK(tidepool_exists(store, key, length) == 1);
    CHECK(tidepool_length(store, key, length) == (int64_t)sizeof value);
    CHECK(tidepool_get(store, key, length, read, sizeof read) == (int64_t)sizeof value);
    CHECK(memcmp(value, read, sizeof value) == 0);
    CHECK(tidepool_get(store, key, length, read, 10) == TIDEPOOL_INVALID);
    CHECK(strcmp(tidepool_error_reason(), "BAD_RANGE") == 0);
    CHECK(tidepool_put(store, key, length, "", 0, TIDEPOOL_PUT_UPSERT | TIDEPOOL_PUT_SOFT_PIN(600)) == 1);
    CHECK(tidepool_put(store, key, length, "", 0, TIDEPOOL_PUT_SOFT_PIN(86401)) == TIDEPOOL_INVALID);
    CHECK(tidepool_put(store, key, length, "", 0, TIDEPOOL_PUT_UPSERT | TIDEPOOL_PUT_PIN) == 1);
    CHECK(tidepool_get(store, key, length, NULL, 0) == 0);
    CHECK(tidepool_remove(store, key, length, 0) == TIDEPOOL_CONFLICT);
    CHECK(tidepool_remove(store, key, length, 1) == 1);
    CHECK(tidepool_remove(store, key, length, 1) == 0);
    CHECK(tidepool_put(store, "", 0, "v", 1, 0) == TIDEPOOL_INVALID);
    CHECK(tidepool_put(store, key, length, "v", 1, 64) == TIDEPOOL_INVALID);
    batches(store);
    streams(store);
    tidepool_close(store);
}

int main(int count, char **arguments) {
    no_store();
    engines();
    if (count > 1) objects(arguments[1]);
    puts("ok");
    return 0;
}
