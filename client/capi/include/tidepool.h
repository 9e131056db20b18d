/* The C library of Tidepool. Link with -ltidepool.
 *
 * Calls of tidepool_* wait, may be made by many threads at once, and end by the deadline of their connection. Negative
 * results are codes that say what to do next; tidepool_error_reason and tidepool_error_message say what happened. Pointers
 * that are null are errors; others are the caller's word. */
#ifndef TIDEPOOL_H
#define TIDEPOOL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Codes. */
#define TIDEPOOL_INVALID (-1)        /* fix the call */
#define TIDEPOOL_MISSING (-2)        /* there is no such object */
#define TIDEPOOL_CONFLICT (-3)       /* the state of something forbids it: it is pinned */
#define TIDEPOOL_EXHAUSTED (-4)      /* no room now */
#define TIDEPOOL_UNAVAILABLE (-5)    /* the server can't be reached, or does not know yet */
#define TIDEPOOL_DEADLINE (-6)       /* whether it was done is unknown */
#define TIDEPOOL_DENIED (-7)         /* the token is missing or wrong */
#define TIDEPOOL_CORRUPT (-8)        /* the bytes that came are not those that were stored */
#define TIDEPOOL_UNIMPLEMENTED (-9)  /* not built */
#define TIDEPOOL_INTERNAL (-10)      /* a bug */

/* Flags of tidepool_put. */
#define TIDEPOOL_PUT_UPSERT 1u /* replace an object that is there */
#define TIDEPOOL_PUT_NVME 2u   /* acknowledged when a copy on disk is durable */
#define TIDEPOOL_PUT_PIN 4u    /* no eviction */
/* Evicted after others, for 1 to 86,400 seconds from now on. */
#define TIDEPOOL_PUT_SOFT_PIN(seconds) ((uint32_t)(seconds) << 8)

typedef struct tidepool_store tidepool_store;

/* Of the last call of this thread that failed. Never null; good until the next that fails. */
const char *tidepool_error_reason(void);
const char *tidepool_error_message(void);

/* Connects to a node: host:port, or unix:/path on its host; null: 127.0.0.1:7420. token: the cluster's secret, or null.
 * deadline_ms: of each call, 0: 30 s. 0, or a code. */
int32_t tidepool_connect(const char *endpoint, const char *token, uint64_t deadline_ms, tidepool_store **store);
/* Null is fine. No call may be under way. */
void tidepool_close(tidepool_store *store);

/* 1: stored. 0: the key has an object, nothing was written. Or a code. */
int32_t tidepool_put(const tidepool_store *store, const void *key, size_t key_length, const void *value, size_t length,
                     uint32_t flags);
/* The object's length; its bytes are at the start of buffer. TIDEPOOL_MISSING, or another code. */
int64_t tidepool_get(const tidepool_store *store, const void *key, size_t key_length, void *buffer, size_t capacity);
/* The object's length, TIDEPOOL_MISSING, or another code. */
int64_t tidepool_length(const tidepool_store *store, const void *key, size_t key_length);
/* 1, 0, or a code. */
int32_t tidepool_exists(const tidepool_store *store, const void *key, size_t key_length);
/* 1: removed. 0: there is none. TIDEPOOL_CONFLICT: it is pinned, and force is 0. Or another code. */
int32_t tidepool_remove(const tidepool_store *store, const void *key, size_t key_length, int32_t force);

/* Many objects at a time: one result each, in order, as of the call for one. 0, or the code of what kept all of them from being
 * done: then the results say nothing. */
typedef struct tidepool_slice {
    const void *start;
    size_t length;
} tidepool_slice;
typedef struct tidepool_room {
    void *start;
    size_t length;
} tidepool_room;

int32_t tidepool_put_batch(const tidepool_store *store, size_t count, const tidepool_slice *keys,
                           const tidepool_slice *values, uint32_t flags, int32_t *results);
/* The rooms do not overlap. */
int32_t tidepool_get_batch(const tidepool_store *store, size_t count, const tidepool_slice *keys,
                           const tidepool_room *rooms, int64_t *results);
int32_t tidepool_exists_batch(const tidepool_store *store, size_t count, const tidepool_slice *keys, int32_t *results);
int32_t tidepool_remove_batch(const tidepool_store *store, size_t count, const tidepool_slice *keys, int32_t force,
                              int32_t *results);

/* Objects piece by piece. A reader or a writer is used by one thread at a time, and may outlive its connection. */
typedef struct tidepool_reader tidepool_reader;
typedef struct tidepool_writer tidepool_writer;

/* length bytes from offset on, UINT64_MAX: to the end. How many will come, TIDEPOOL_MISSING, or another code. */
int64_t tidepool_read_begin(const tidepool_store *store, const void *key, size_t key_length, uint64_t offset,
                            uint64_t length, tidepool_reader **reader);
/* How many bytes came; 0: all came, and they are what was stored; or a code: nothing that came may be relied on. */
int64_t tidepool_read(tidepool_reader *reader, void *buffer, size_t capacity);
/* At any time. Null is fine. */
void tidepool_read_end(tidepool_reader *reader);

/* An object of exactly length bytes. 0, or a code. */
int32_t tidepool_write_begin(const tidepool_store *store, const void *key, size_t key_length, uint64_t length,
                             uint32_t flags, tidepool_writer **writer);
/* 0, or a code: then the put has ended, and nothing was stored; the writer is still to be ended or abandoned. From one call to
 * the next must pass less time than the connection's deadline, or the put ends with TIDEPOOL_DEADLINE. */
int32_t tidepool_write(tidepool_writer *writer, const void *bytes, size_t length);
/* 1: stored. 0: the key has an object. Or a code. The writer is gone. */
int32_t tidepool_write_end(tidepool_writer *writer);
/* Nothing is stored. The writer is gone. Null is fine. */
void tidepool_write_abandon(tidepool_writer *writer);

/* The transfer engine, by the names that programs written for Mooncake's C API link to. Codes are 0 or -1; -7: memory
 * overlaps registered memory, -3: it is not registered. */
typedef void *transfer_engine_t;
typedef int32_t segment_id_t;
typedef uint64_t batch_id_t;

#define INVALID_BATCH UINT64_MAX
#define OPCODE_READ 0
#define OPCODE_WRITE 1
#define STATUS_WAITING 0
#define STATUS_PENDING 1
#define STATUS_INVALID 2
#define STATUS_CANCELED 3
#define STATUS_COMPLETED 4
#define STATUS_TIMEOUT 5
#define STATUS_FAILED 6

typedef struct transfer_request {
    int opcode;
    void *source;           /* here, in registered memory */
    segment_id_t target_id; /* of openSegment */
    uint64_t target_offset; /* an address in the peer's process */
    uint64_t length;
} transfer_request_t;

typedef struct transfer_status {
    int status;
    uint64_t transferred_bytes;
} transfer_status_t;

typedef struct notify_msg {
    char *name;
    char *msg;
} notify_msg_t;

/* metadata: "P2PHANDSHAKE" only. Listens at ip_or_host_name, or where that is empty at the host of local_server_name, on a
 * port of its choice if rpc_port is 0. Null if it can't. */
transfer_engine_t createTransferEngine(const char *metadata, const char *local_server_name, const char *ip_or_host_name,
                                       uint64_t rpc_port, int auto_discover);
void destroyTransferEngine(transfer_engine_t engine);
/* "ip:port", which peers give to openSegment. */
int getLocalIpAndPort(transfer_engine_t engine, char *buffer, size_t length);
segment_id_t openSegment(transfer_engine_t engine, const char *name);
int closeSegment(transfer_engine_t engine, segment_id_t segment);
int registerLocalMemory(transfer_engine_t engine, void *address, size_t length, const char *location,
                        int remote_accessible);
int unregisterLocalMemory(transfer_engine_t engine, void *address);
batch_id_t allocateBatchID(transfer_engine_t engine, size_t size);
int submitTransfer(transfer_engine_t engine, batch_id_t batch, transfer_request_t *entries, size_t count);
int submitTransferWithNotify(transfer_engine_t engine, batch_id_t batch, transfer_request_t *entries, size_t count,
                             notify_msg_t message);
int getTransferStatus(transfer_engine_t engine, batch_id_t batch, size_t task, transfer_status_t *status);
int freeBatchID(transfer_engine_t engine, batch_id_t batch);
int genNotifyInEngine(transfer_engine_t engine, uint64_t target, notify_msg_t message);
notify_msg_t *getNotifsFromEngine(transfer_engine_t engine, int *size);
int freeNotifsMsgBuf(notify_msg_t *messages, int size);

#ifdef __cplusplus
}
#endif

#endif
