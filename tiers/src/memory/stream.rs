//! Copies past the cache.
//!
//! A slice that comes in is far larger than what the cache keeps of its place in the tier, so a common store first reads
//! each line from memory that it then overwrites. Streaming stores leave that read out: measured on an EPYC with a source
//! in the cache, 16 GB/s beside 7.5.
#![expect(unsafe_code, reason = "streaming stores are instructions of the processor")]

/// Bytes of a cache line: what a streaming store fills at a time.
const LINE_BYTES: usize = 64;

/// Copies `source` to `target`, which is not read soon. Other threads see the bytes with whatever this one releases later.
///
/// # Panics
/// If the lengths differ.
pub(super) fn copy(target: &mut [u8], source: &[u8]) {
    assert_eq!(target.len(), source.len(), "bytes to copy and room for them");
    let head = target.as_ptr().align_offset(LINE_BYTES).min(target.len());
    let (first, target) = target.split_at_mut(head);
    let (before, source) = source.split_at(head);
    first.copy_from_slice(before);
    let (lines, last) = target.split_at_mut(target.len() / LINE_BYTES * LINE_BYTES);
    let (source, after) = source.split_at(lines.len());
    copy_lines(lines, source);
    last.copy_from_slice(after);
}

/// Copies whole lines to where lines begin.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn copy_lines(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let pairs = target.chunks_exact_mut(LINE_BYTES).zip(source.chunks_exact(LINE_BYTES));
    for (target, source) in pairs {
        let (to, from) = (target.as_mut_ptr().cast::<__m128i>(), source.as_ptr().cast::<__m128i>());
        debug_assert!(to.is_aligned());
        // SAFETY: both are 64 bytes that live for this turn, and `target` is ours alone. A load needs no alignment; the
        // store's 16 bytes are there, since `copy` starts at a multiple of 64. SSE2 is part of x86-64.
        unsafe {
            let line = [0, 1, 2, 3].map(|at| _mm_loadu_si128(from.add(at)));
            _mm_stream_si128(to, line[0]);
            _mm_stream_si128(to.add(1), line[1]);
            _mm_stream_si128(to.add(2), line[2]);
            _mm_stream_si128(to.add(3), line[3]);
        }
    }
    // Streaming stores are in no order with later ones, those that publish the bytes among them (Intel SDM vol. 1, 10.4.6.2).
    // SAFETY: it changes nothing; SSE is part of x86-64.
    unsafe { _mm_sfence() };
}

/// Copies whole lines.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn copy_lines(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_place_is_copied_and_nothing_beside_it() {
        let source: Vec<u8> = (0..600_u32).map(|at| (at * 7 % 251) as u8 | 1).collect();
        for start in 0..70 {
            for length in (0..=200).chain([447, 512]) {
                for from in [0, 1, 17] {
                    let mut target = vec![0; 700];
                    copy(&mut target[start..start + length], &source[from..from + length]);
                    assert_eq!(target[start..start + length], source[from..from + length], "{start} {length} {from}");
                    assert!(target[..start].iter().chain(&target[start + length..]).all(|&byte| byte == 0));
                }
            }
        }
    }
}
