//! What both databases have in common.

use rocksdb::{BlockBasedOptions, Cache, DBCompressionType, Options};

/// Two of them at most: one that fills, one that is written out.
const MEMTABLE_BYTES: usize = 4 << 20;
/// Files of that size before they are merged into the next level, which rewrites all of it: few, since memory is what
/// memtables cost and nobody looks for single keys. Writers are slowed down, and stopped, at several times as many.
const UNSORTED_FILES: i32 = 16;
/// Both are read from end to end at the start, and hardly ever after.
const CACHE_BYTES: usize = 4 << 20;

/// Options of a database that is made if it is missing, and checks what it reads.
pub(super) fn options() -> Options {
    let mut options = Options::default();
    options.create_if_missing(true);
    options.set_paranoid_checks(true);
    options.set_write_buffer_size(MEMTABLE_BYTES);
    options.set_max_write_buffer_number(2);
    options.set_max_background_jobs(2);
    options.set_level_zero_file_num_compaction_trigger(UNSORTED_FILES);
    options.set_level_zero_slowdown_writes_trigger(3 * UNSORTED_FILES);
    options.set_level_zero_stop_writes_trigger(4 * UNSORTED_FILES);
    options.set_compression_type(DBCompressionType::Lz4);
    // RocksDB's own diary, which nobody reads but after an accident.
    options.set_keep_log_file_num(2);
    options.set_max_log_file_size(1 << 20);
    let mut table = BlockBasedOptions::default();
    table.set_block_cache(&Cache::new_lru_cache(CACHE_BYTES));
    options.set_block_based_table_factory(&table);
    options
}
