//! What libibverbs looks like from outside: its structures and numbers, as in its header `infiniband/verbs.h`.
//!
//! Written by hand, because the crates that generate them build rdma-core or link the library hard (see the decision
//! *Verbs are loaded when the engine starts*). Their layout is part of the library's binary interface, which has not
//! changed since version 1.1; sizes and offsets below were printed by a C program for x86-64 and are checked when this
//! is compiled. Only what is used has a field; fillers keep the rest.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// Structures of the library that are never looked into.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(C)]
        pub(super) struct $name([u8; 0]);
    )*};
}
opaque! {
    /// `ibv_device`.
    Device,
    /// `ibv_pd`.
    Domain,
    /// `ibv_cq`.
    Queue,
}

/// `ibv_context`, as far as the last field that is used.
#[repr(C)]
pub(super) struct Context {
    _device: *mut Device,
    _operations_0: [usize; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut Queue, c_int, *mut Completion) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut Queue, c_int) -> c_int,
    _operations_13: [usize; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut Pair, *mut Work, *mut *mut Work) -> c_int,
    _operations_26: [usize; 6],
    _cmd_fd: c_int,
    pub(super) async_fd: c_int,
}

/// `ibv_comp_channel`.
#[repr(C)]
pub(super) struct Channel {
    _context: *mut Context,
    pub(super) fd: c_int,
    _references: c_int,
}

/// `ibv_mr`.
#[repr(C)]
pub(super) struct Region {
    _context: *mut Context,
    _domain: *mut Domain,
    _address: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `ibv_qp`, as far as its number.
#[repr(C)]
pub(super) struct Pair {
    _pointers: [usize; 6],
    _handle: u32,
    pub(super) number: u32,
}

/// `ibv_device_attr`.
#[repr(C)]
pub(super) struct DeviceAttributes {
    _firmware: [c_char; 64],
    _guids: [u64; 2],
    pub(super) max_mr_size: u64,
    _page_sizes: u64,
    _vendor: [u32; 4],
    pub(super) max_qp_wr: c_int,
    _capabilities: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    _max_cq: c_int,
    pub(super) max_cqe: c_int,
    _max_mr_pd: [c_int; 2],
    pub(super) max_qp_rd_atom: c_int,
    _max_ee_res_rd_atom: [c_int; 2],
    pub(super) max_qp_init_rd_atom: c_int,
    _maxima: [c_int; 16],
    _max_pkeys: u16,
    _ack_delay: u8,
    pub(super) ports: u8,
    _end: u32,
}

/// `ibv_port_attr`.
#[repr(C)]
pub(super) struct PortAttributes {
    pub(super) state: c_int,
    _max_mtu: c_int,
    pub(super) active_mtu: c_int,
    pub(super) gid_table_length: c_int,
    _capabilities: u32,
    pub(super) max_message_bytes: u32,
    _counters: [u32; 2],
    _pkeys: u16,
    pub(super) lid: u16,
    _subnet_manager_lid: u16,
    _subnet: [u8; 5],
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    _physical_state: u8,
    pub(super) link_layer: u8,
    _flags: u8,
    _capabilities_2: u16,
}

/// `ibv_gid_entry`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct GidEntry {
    pub(super) gid: [u8; 16],
    pub(super) index: u32,
    pub(super) port: u32,
    pub(super) gid_type: u32,
    pub(super) interface: u32,
}

/// `ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Route {
    pub(super) target: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) source_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// `ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Address {
    pub(super) route: Route,
    pub(super) lid: u16,
    pub(super) service_level: u8,
    pub(super) path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

/// `ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PairLimits {
    pub(super) send_work: u32,
    pub(super) receive_work: u32,
    pub(super) send_ranges: u32,
    pub(super) receive_ranges: u32,
    pub(super) inline_bytes: u32,
}

/// `ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct PairSetup {
    pub(super) context: *mut c_void,
    pub(super) send_queue: *mut Queue,
    pub(super) receive_queue: *mut Queue,
    pub(super) shared_receive_queue: *mut c_void,
    pub(super) limits: PairLimits,
    pub(super) pair_type: c_int,
    pub(super) signal_all: c_int,
}

/// `ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PairAttributes {
    pub(super) state: c_int,
    pub(super) current_state: c_int,
    pub(super) path_mtu: c_int,
    pub(super) migration_state: c_int,
    pub(super) qkey: u32,
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) target_number: u32,
    pub(super) access: c_uint,
    pub(super) limits: PairLimits,
    pub(super) address: Address,
    pub(super) other_address: Address,
    pub(super) pkey_index: u16,
    pub(super) other_pkey_index: u16,
    pub(super) notify_drained: u8,
    pub(super) is_draining: u8,
    pub(super) reads_out: u8,
    pub(super) reads_in: u8,
    pub(super) receiver_not_ready_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) receiver_not_ready_retries: u8,
    pub(super) other_port: u8,
    pub(super) other_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `ibv_send_wr`, with the RDMA arm of its union.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) id: u64,
    pub(super) next: *mut Self,
    pub(super) ranges: *mut Range,
    pub(super) range_count: c_int,
    pub(super) opcode: c_int,
    pub(super) flags: c_uint,
    pub(super) immediate: u32,
    pub(super) remote_address: u64,
    pub(super) rkey: u32,
    pub(super) rest: [u64; 9],
}

/// `ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: c_int,
    pub(super) opcode: c_int,
    pub(super) vendor_error: u32,
    pub(super) byte_length: u32,
    pub(super) immediate: u32,
    pub(super) pair: u32,
    pub(super) source_pair: u32,
    pub(super) flags: c_uint,
    pub(super) tail: [u16; 3],
}

/// `ibv_async_event`.
#[repr(C)]
pub(super) struct Event {
    /// A union: the port's number, or a pointer to what the event is about.
    pub(super) element: u64,
    pub(super) kind: c_int,
}

const _: () = {
    assert!(offset_of!(Context, poll_cq) == 96 && offset_of!(Context, req_notify_cq) == 104);
    assert!(offset_of!(Context, post_send) == 208 && offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Channel, fd) == 8 && size_of::<Channel>() == 16);
    assert!(offset_of!(Region, lkey) == 36 && offset_of!(Region, rkey) == 40 && size_of::<Region>() == 48);
    assert!(offset_of!(Pair, number) == 52);
    assert!(size_of::<DeviceAttributes>() == 232 && offset_of!(DeviceAttributes, max_mr_size) == 80);
    assert!(offset_of!(DeviceAttributes, max_qp_wr) == 112 && offset_of!(DeviceAttributes, max_sge_rd) == 124);
    assert!(offset_of!(DeviceAttributes, max_cqe) == 132 && offset_of!(DeviceAttributes, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttributes, max_qp_init_rd_atom) == 156 && offset_of!(DeviceAttributes, ports) == 227);
    assert!(size_of::<PortAttributes>() == 52 && offset_of!(PortAttributes, lid) == 34);
    assert!(offset_of!(PortAttributes, active_width) == 43 && offset_of!(PortAttributes, link_layer) == 46);
    assert!(size_of::<GidEntry>() == 32 && size_of::<Route>() == 24);
    assert!(size_of::<Address>() == 32 && offset_of!(Address, lid) == 24 && offset_of!(Address, port) == 30);
    assert!(size_of::<PairLimits>() == 20 && size_of::<PairSetup>() == 64);
    assert!(offset_of!(PairSetup, limits) == 32 && offset_of!(PairSetup, pair_type) == 52);
    assert!(size_of::<PairAttributes>() == 144 && offset_of!(PairAttributes, address) == 56);
    assert!(offset_of!(PairAttributes, pkey_index) == 120 && offset_of!(PairAttributes, reads_out) == 126);
    assert!(offset_of!(PairAttributes, port) == 129 && offset_of!(PairAttributes, rate_limit) == 136);
    assert!(size_of::<Range>() == 16);
    assert!(size_of::<Work>() == 128 && offset_of!(Work, opcode) == 28 && offset_of!(Work, remote_address) == 40);
    assert!(offset_of!(Work, rkey) == 48 && size_of::<Completion>() == 48 && offset_of!(Completion, flags) == 36);
    assert!(size_of::<Event>() == 16 && offset_of!(Event, kind) == 8);
};

// Numbers of the enumerations.
pub(super) const PORT_ACTIVE: c_int = 4;
pub(super) const LINK_ETHERNET: u8 = 2;
pub(super) const GID_ROCE_V2: u32 = 2;
pub(super) const PAIR_RELIABLE: c_int = 2;
pub(super) const WRITE: c_int = 0;
pub(super) const READ: c_int = 4;
pub(super) const SEND_SIGNALLED: c_uint = 2;
pub(super) const SEND_INLINE: c_uint = 8;

pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(super) const ACCESS_REMOTE_READ: c_int = 4;

pub(super) const STATE_INIT: c_int = 1;
pub(super) const STATE_READY_TO_RECEIVE: c_int = 2;
pub(super) const STATE_READY_TO_SEND: c_int = 3;
pub(super) const STATE_ERROR: c_int = 6;

pub(super) const SET_STATE: c_int = 1;
pub(super) const SET_ACCESS: c_int = 1 << 3;
pub(super) const SET_PKEY_INDEX: c_int = 1 << 4;
pub(super) const SET_PORT: c_int = 1 << 5;
pub(super) const SET_ADDRESS: c_int = 1 << 7;
pub(super) const SET_PATH_MTU: c_int = 1 << 8;
pub(super) const SET_TIMEOUT: c_int = 1 << 9;
pub(super) const SET_RETRIES: c_int = 1 << 10;
pub(super) const SET_RNR_RETRIES: c_int = 1 << 11;
pub(super) const SET_RECEIVE_PSN: c_int = 1 << 12;
pub(super) const SET_READS_OUT: c_int = 1 << 13;
pub(super) const SET_RNR_TIMER: c_int = 1 << 15;
pub(super) const SET_SEND_PSN: c_int = 1 << 16;
pub(super) const SET_READS_IN: c_int = 1 << 17;
pub(super) const SET_TARGET_NUMBER: c_int = 1 << 20;

pub(super) const EVENT_DEVICE_FATAL: c_int = 8;
pub(super) const EVENT_PORT_ACTIVE: c_int = 9;
pub(super) const EVENT_PORT_ERROR: c_int = 10;
pub(super) const EVENT_LID_CHANGE: c_int = 11;
pub(super) const EVENT_GID_CHANGE: c_int = 18;
