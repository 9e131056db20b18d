//! Verbs as safe types: the only place that calls libibverbs.
//!
//! The library is loaded when it is first asked for, never linked, and never unloaded: a program with this in it starts
//! on machines without RDMA, and says why there is none ([`NoRdma`]).
//!
//! Who owns what, and until when:
//!
//! ```text
//! Context <--Arc-- Domain <--Arc-- Part (a registered range; holds a clone of its Memory)
//!                     ^              ^
//!                     +---- QueuePair (with its completion queue) --lent: every Part of work that has not ended
//! ```
//!
//! - Each type ends what it stands for in its drop, and holds what must outlive it, so the order is always right.
//! - A device reads and writes memory only by work that was posted, or by peers through a part with remote rights. Work
//!   keeps its parts until its completion was polled or its queue pair is destroyed; a part keeps its memory until it is
//!   deregistered. If the library refuses either, what the device may still touch is leaked, and said so.
//! - Bytes are never seen through references here, only addressed (see `memory`).
//!
//! Source: manual pages of rdma-core, `ibv_*(3)`; verbs chapter 11 of the InfiniBand architecture, volume 1.
#![expect(unsafe_code, reason = "calls libibverbs through its C interface; each block is argued")]

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use super::abi;
use super::endpoint::{Endpoint, Gid, LinkLayer, PathMtu};
use crate::memory::Memory;

/// Name that the library has had since its first version.
const LIBRARY: &str = "libibverbs.so.1";
/// Completions taken in one call.
const COMPLETIONS: usize = 32;
/// Inline bytes that are asked for: what most devices take without making their work entries larger.
const INLINE_BYTES: u32 = 220;

/// Why this machine can't do RDMA.
#[derive(Debug, thiserror::Error)]
pub enum NoRdma {
    /// The library is not there.
    #[error("libibverbs.so.1 can't be loaded ({0}): the package rdma-core (Debian: ibverbs-providers) has it")]
    NoLibrary(String),
    /// It is older than rdma-core 31.
    #[error("libibverbs.so.1 is too old: it has no {0}")]
    OldLibrary(&'static str),
    /// `ENOSYS`.
    #[error("no RDMA in this kernel (its module ib_uverbs is not loaded)")]
    NoKernel,
    /// The kernel has RDMA, but no device does.
    #[error("no RDMA device")]
    NoDevice,
    /// Listing or opening devices failed.
    #[error("{action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
}

macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Since rdma-core 34: absent means that device memory can't be registered.
            register_dmabuf: Option<RegisterDmabuf>,
        }

        impl Functions {
            fn load() -> Result<Self, NoRdma> {
                // SAFETY: the library's initialisers set up its own tables and lists of drivers, nothing of this program.
                let library = unsafe { libloading::Library::new(LIBRARY) };
                let library = library.map_err(|error| NoRdma::NoLibrary(error.to_string()))?;
                let functions = Self {
                    $($field: {
                        // SAFETY: the signature is the one of the library's header. A symbol asked for without a
                        // version is its default, which is the one that the header describes.
                        let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| NoRdma::OldLibrary($symbol))?
                    },)*
                    register_dmabuf: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(b"ibv_reg_dmabuf_mr\0") };
                        symbol.ok().map(|symbol| *symbol)
                    },
                };
                // Never unloaded: the functions are valid for as long as the process runs.
                std::mem::forget(library);
                Ok(functions)
            }
        }
    };
}

type RegisterDmabuf = unsafe extern "C" fn(*mut abi::Domain, u64, usize, u64, c_int, c_int) -> *mut abi::Region;

functions! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut abi::Device;
    free_device_list = "ibv_free_device_list": fn(*mut *mut abi::Device);
    get_device_name = "ibv_get_device_name": fn(*mut abi::Device) -> *const c_char;
    open_device = "ibv_open_device": fn(*mut abi::Device) -> *mut abi::Context;
    close_device = "ibv_close_device": fn(*mut abi::Context) -> c_int;
    query_device = "ibv_query_device": fn(*mut abi::Context, *mut abi::DeviceAttributes) -> c_int;
    query_port = "ibv_query_port": fn(*mut abi::Context, u8, *mut abi::PortAttributes) -> c_int;
    query_gids = "_ibv_query_gid_table": fn(*mut abi::Context, *mut abi::GidEntry, usize, u32, usize) -> isize;
    get_async_event = "ibv_get_async_event": fn(*mut abi::Context, *mut abi::Event) -> c_int;
    ack_async_event = "ibv_ack_async_event": fn(*mut abi::Event);
    alloc_domain = "ibv_alloc_pd": fn(*mut abi::Context) -> *mut abi::Domain;
    dealloc_domain = "ibv_dealloc_pd": fn(*mut abi::Domain) -> c_int;
    register = "ibv_reg_mr": fn(*mut abi::Domain, *mut c_void, usize, c_int) -> *mut abi::Region;
    deregister = "ibv_dereg_mr": fn(*mut abi::Region) -> c_int;
    create_channel = "ibv_create_comp_channel": fn(*mut abi::Context) -> *mut abi::Channel;
    destroy_channel = "ibv_destroy_comp_channel": fn(*mut abi::Channel) -> c_int;
    create_queue = "ibv_create_cq":
        fn(*mut abi::Context, c_int, *mut c_void, *mut abi::Channel, c_int) -> *mut abi::Queue;
    destroy_queue = "ibv_destroy_cq": fn(*mut abi::Queue) -> c_int;
    get_queue_event = "ibv_get_cq_event": fn(*mut abi::Channel, *mut *mut abi::Queue, *mut *mut c_void) -> c_int;
    ack_queue_events = "ibv_ack_cq_events": fn(*mut abi::Queue, u32);
    create_pair = "ibv_create_qp": fn(*mut abi::Domain, *mut abi::PairSetup) -> *mut abi::Pair;
    modify_pair = "ibv_modify_qp": fn(*mut abi::Pair, *mut abi::PairAttributes, c_int) -> c_int;
    destroy_pair = "ibv_destroy_qp": fn(*mut abi::Pair) -> c_int;
}

/// Loads the library once.
fn functions() -> Result<&'static Functions, &'static NoRdma> {
    static FUNCTIONS: OnceLock<Result<Functions, NoRdma>> = OnceLock::new();
    FUNCTIONS.get_or_init(Functions::load).as_ref()
}

/// Verbs give an error number, or -1 and `errno`.
fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        error if error > 0 => Err(io::Error::from_raw_os_error(error)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An object that a function made, or `errno`.
fn made<T>(object: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(object).ok_or_else(io::Error::last_os_error)
}

/// What a device can do, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most bytes of one registration.
    pub(crate) registration_bytes: u64,
    /// Most work on its way in one queue pair.
    pub(crate) work: u32,
    /// Most local ranges of one work request.
    pub(crate) ranges: u32,
    /// Most reads on their way that a queue pair answers.
    pub(crate) reads_in: u8,
    /// Most reads on their way that a queue pair issues.
    pub(crate) reads_out: u8,
    pub(crate) ports: u8,
}

/// What a port is like right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) is_active: bool,
    pub(crate) link: LinkLayer,
    pub(crate) mtu: PathMtu,
    pub(crate) lid: u16,
    pub(crate) max_message_bytes: u32,
    /// Bits a second, before encoding; 0 if the device says nothing that is understood.
    pub(crate) speed: u64,
}

/// Something that happened to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    PortActive(u8),
    PortError(u8),
    /// Addresses of a port changed.
    AddressChange(u8),
    DeviceFatal,
    /// About a queue pair or queue, which say the same by their completions; or of no interest.
    Other(i32),
}

/// An open device.
pub(crate) struct Context {
    raw: NonNull<abi::Context>,
    functions: &'static Functions,
    name: String,
    limits: Limits,
}

// SAFETY: libibverbs locks what its threads share (ibv_open_device(3) and the library's documentation: "fully
// thread-safe"), and binds nothing to a thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens all devices. Those that can't be opened (no rights in this container) are left out, and said.
    pub(crate) fn open_all() -> Result<Vec<Arc<Self>>, NoRdma> {
        let functions = functions().map_err(|error| match error {
            NoRdma::NoLibrary(why) => NoRdma::NoLibrary(why.clone()),
            NoRdma::OldLibrary(symbol) => NoRdma::OldLibrary(symbol),
            _ => NoRdma::NoDevice,
        })?;
        let mut count = 0;
        // SAFETY: the function stores the number of devices and gives a list of as many, or null.
        let list = unsafe { (functions.get_device_list)(&raw mut count) };
        if list.is_null() {
            return match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENOSYS) => Err(NoRdma::NoKernel),
                source => Err(NoRdma::System { action: "list RDMA devices", source }),
            };
        }
        let mut opened = Vec::new();
        let mut refusal = None;
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: `list` has `count` devices, valid until it is freed below; opening one takes a reference.
            let context = unsafe { Self::open(functions, *list.add(index)) };
            match context {
                Ok(context) => opened.push(Arc::new(context)),
                Err(error) => {
                    tracing::debug!(%error, "an RDMA device can't be opened");
                    refusal = Some(error);
                }
            }
        }
        // SAFETY: the list came from the library and is not used after this.
        unsafe { (functions.free_device_list)(list) };
        match refusal {
            Some(source) if opened.is_empty() => Err(NoRdma::System { action: "open an RDMA device", source }),
            _ if opened.is_empty() => Err(NoRdma::NoDevice),
            _ => Ok(opened),
        }
    }

    /// # Safety
    /// `device` is one of a list that was not freed.
    unsafe fn open(functions: &'static Functions, device: *mut abi::Device) -> io::Result<Self> {
        // SAFETY: the caller's device is valid; the name is a C string that lives as long as it.
        let name = unsafe { CStr::from_ptr((functions.get_device_name)(device)) }.to_string_lossy().into_owned();
        // SAFETY: as above.
        let raw = made(unsafe { (functions.open_device)(device) })?;
        let limits = Limits { registration_bytes: 0, work: 0, ranges: 0, reads_in: 0, reads_out: 0, ports: 0 };
        // From here on the drop closes it.
        let mut context = Self { raw, functions, name, limits };
        let mut attributes = MaybeUninit::<abi::DeviceAttributes>::zeroed();
        // SAFETY: `raw` is open; the function fills the structure, for which all zeros is a valid value.
        check(unsafe { (functions.query_device)(raw.as_ptr(), attributes.as_mut_ptr()) })?;
        // SAFETY: zeroed above, and made of numbers only.
        let attributes = unsafe { attributes.assume_init() };
        let count = |number: c_int| u32::try_from(number).unwrap_or(0);
        let reads = |number: c_int| u8::try_from(number.clamp(0, 255)).unwrap_or(u8::MAX);
        let ranges = match attributes.max_sge_rd {
            0 => attributes.max_sge,
            of_reads => of_reads.min(attributes.max_sge),
        };
        context.limits = Limits {
            registration_bytes: attributes.max_mr_size,
            work: count(attributes.max_qp_wr).min(count(attributes.max_cqe)),
            ranges: count(ranges).max(1),
            reads_in: reads(attributes.max_qp_rd_atom),
            reads_out: reads(attributes.max_qp_init_rd_atom),
            ports: attributes.ports,
        };
        set_nonblocking(context.events())?;
        Ok(context)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// What a port, counted from 1, is like now.
    pub(crate) fn port(&self, port: u8) -> io::Result<Port> {
        Ok(self.port_attributes(port)?.into())
    }

    fn port_attributes(&self, port: u8) -> io::Result<abi::PortAttributes> {
        let mut attributes = MaybeUninit::<abi::PortAttributes>::zeroed();
        // SAFETY: the context is open; the function fills the structure or a part of it, for which all zeros is valid.
        check(unsafe { (self.functions.query_port)(self.raw.as_ptr(), port, attributes.as_mut_ptr()) })?;
        // SAFETY: zeroed above, and made of numbers only.
        Ok(unsafe { attributes.assume_init() })
    }

    /// GIDs of a port that have a meaning, in the order of its table.
    pub(crate) fn gids(&self, port: u8) -> io::Result<Vec<Gid>> {
        let length: usize = (1..=self.limits.ports)
            .map(|port| self.port_attributes(port).map_or(0, |attributes| attributes.gid_table_length))
            .map(|length| usize::try_from(length).unwrap_or(0))
            .sum();
        let zero = abi::GidEntry { gid: [0; 16], index: 0, port: 0, gid_type: 0, interface: 0 };
        let mut entries = vec![zero; length];
        let (table, size) = (entries.as_mut_ptr(), size_of::<abi::GidEntry>());
        // SAFETY: the context is open; the function writes at most `length` entries of `size` bytes.
        let count = unsafe { (self.functions.query_gids)(self.raw.as_ptr(), table, length, 0, size) };
        let count = usize::try_from(count)
            .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-count).unwrap_or(libc::EIO)))?;
        let of_port = entries.iter().take(count).filter(|entry| entry.port == u32::from(port));
        let gid = |entry: &abi::GidEntry| Gid {
            index: u8::try_from(entry.index).ok(),
            address: entry.gid,
            is_routable_roce: entry.gid_type == abi::GID_ROCE_V2,
        };
        Ok(of_port.map(gid).collect())
    }

    /// Readable when [`Context::next_event`] has one.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: `async_fd` is set when a device is opened, and open until the context is closed, which the borrow
        // outlives.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().async_fd) }
    }

    /// The oldest event that nobody took.
    pub(crate) fn next_event(&self) -> io::Result<Option<Event>> {
        let mut event = abi::Event { element: 0, kind: 0 };
        // SAFETY: the context is open; the function fills the event, or fails without one.
        if let Err(error) = check(unsafe { (self.functions.get_async_event)(self.raw.as_ptr(), &raw mut event) }) {
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        let port = (event.element & 0xff) as u8;
        let happened = match event.kind {
            abi::EVENT_PORT_ACTIVE => Event::PortActive(port),
            abi::EVENT_PORT_ERROR => Event::PortError(port),
            abi::EVENT_LID_CHANGE | abi::EVENT_GID_CHANGE => Event::AddressChange(port),
            abi::EVENT_DEVICE_FATAL => Event::DeviceFatal,
            other => Event::Other(other),
        };
        // SAFETY: the event came from the library, and is acknowledged once. At once: whoever destroys what an event is
        // about waits for this.
        unsafe { (self.functions.ack_async_event)(&raw mut event) };
        Ok(Some(happened))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all that was made of the context holds it, so nothing of it is left.
        if let Err(error) = check(unsafe { (self.functions.close_device)(self.raw.as_ptr()) }) {
            tracing::warn!(device = self.name, %error, "RDMA device can't be closed");
        }
    }
}

impl From<abi::PortAttributes> for Port {
    fn from(port: abi::PortAttributes) -> Self {
        let lanes = match port.active_width {
            1 => 1,
            2 => 4,
            4 => 8,
            8 => 12,
            16 => 2,
            _ => 0,
        };
        let megabits = match port.active_speed {
            1 => 2_500,
            2 => 5_000,
            4 | 8 => 10_000,
            16 => 14_000,
            32 => 25_000,
            64 => 50_000,
            128 => 100_000,
            _ => 0,
        };
        Self {
            is_active: port.state == abi::PORT_ACTIVE,
            link: if port.link_layer == abi::LINK_ETHERNET { LinkLayer::Ethernet } else { LinkLayer::InfiniBand },
            mtu: PathMtu::of_code(u8::try_from(port.active_mtu).unwrap_or(0)),
            lid: port.lid,
            max_message_bytes: port.max_message_bytes,
            speed: lanes * megabits * 1_000_000,
        }
    }
}

fn set_nonblocking(file: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// A protection domain: registrations and queue pairs of one can be used together.
pub(crate) struct Domain {
    raw: NonNull<abi::Domain>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is open.
        let raw = made(unsafe { (context.functions.alloc_domain)(context.raw.as_ptr()) })?;
        Ok(Self { raw, context: Arc::clone(context) })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: all that was made in the domain holds it, so nothing of it is left.
        if let Err(error) = check(unsafe { (self.context.functions.dealloc_domain)(self.raw.as_ptr()) }) {
            tracing::warn!(%error, "RDMA protection domain can't be given back");
        }
    }
}

/// What a registration allows. The device refuses everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// Own reads may land in it.
    pub(crate) local_write: bool,
    pub(crate) remote_read: bool,
    pub(crate) remote_write: bool,
}

impl Access {
    fn flags(self) -> c_int {
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        // The device demands the right to write locally of whoever grants it remotely.
        flag(self.local_write || self.remote_write, abi::ACCESS_LOCAL_WRITE)
            | flag(self.remote_read, abi::ACCESS_REMOTE_READ)
            | flag(self.remote_write, abi::ACCESS_REMOTE_WRITE)
    }
}

/// A registered range of memory.
pub(crate) struct Part {
    raw: NonNull<abi::Region>,
    domain: Arc<Domain>,
    memory: Memory,
    offset: u64,
    length: u64,
}

// SAFETY: as for `Context`; `Memory` is Send and Sync.
unsafe impl Send for Part {}
// SAFETY: as for `Context`.
unsafe impl Sync for Part {}

impl Part {
    /// Registers `length` bytes of `memory` at `offset`. Pins them, which takes about 30 ms a GiB.
    ///
    /// Memory with a dma-buf is registered by that; if library, kernel or device can't, by its address.
    pub(crate) fn register(
        domain: &Arc<Domain>,
        memory: &Memory,
        offset: u64,
        length: u64,
        access: Access,
    ) -> io::Result<Self> {
        assert!(memory.is_writable() || !(access.local_write || access.remote_write), "memory is mapped read-only");
        let outside = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let address = memory.address(offset, length).map_err(outside)?;
        let functions = domain.context.functions;
        let by_dmabuf = match (memory.dmabuf(), functions.register_dmabuf) {
            (Some((file, start)), Some(register)) => {
                // SAFETY: the descriptor is open while `memory` lives, of which the part holds a clone; the kernel checks
                // the range against the buffer. Peers and work name it by the same addresses as the mapping.
                made(unsafe {
                    let (raw, address) = (domain.raw.as_ptr(), address.addr() as u64);
                    register(raw, start + offset, length as usize, address, file.as_raw_fd(), access.flags())
                })
                .inspect_err(|error| tracing::debug!(%error, "dma-buf can't be registered: by address"))
                .ok()
            }
            _ => None,
        };
        let raw = match by_dmabuf {
            Some(raw) => raw,
            // SAFETY: the range lies in `memory`, which lives until the part is dropped, which deregisters first; it is
            // mapped writable if the access writes (asserted). What the device writes is seen through no reference.
            None => made(unsafe {
                (functions.register)(domain.raw.as_ptr(), address.cast(), length as usize, access.flags())
            })?,
        };
        Ok(Self { raw, domain: Arc::clone(domain), memory: memory.clone(), offset, length })
    }

    /// What peers need to use it: first address, and key.
    pub(crate) fn remote(&self) -> io::Result<(u64, u32)> {
        // SAFETY: the registration is alive, and its keys don't change.
        Ok((self.address(0, self.length)?, unsafe { self.raw.as_ref() }.rkey))
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Address of a range inside the part.
    fn address(&self, offset: u64, length: u64) -> io::Result<u64> {
        let inside = crate::slice::check_range(offset, length, self.length)
            .and_then(|()| self.memory.address(self.offset + offset, length));
        Ok(inside.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?.addr() as u64)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: work that names the part holds it, so no own work does; peers' is refused from here on. The call
        // returns when the device has let go of the memory.
        if let Err(error) = check(unsafe { (self.domain.context.functions.deregister)(self.raw.as_ptr()) }) {
            tracing::error!(%error, bytes = self.length, "RDMA memory can't be deregistered: it is never freed");
            std::mem::forget(self.memory.clone());
        }
    }
}

/// How work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Success,
    /// Another's failure, or [`QueuePair::stop`], ended it. Whether its bytes moved is not known.
    Flushed,
    /// The peer's device refuses: no such key, no right, out of range.
    RemoteAccess,
    /// The peer's device does not answer.
    RetriesExceeded,
    /// This side's device refuses: our own mistake.
    Local(i32),
    /// Anything else, by the library's number.
    Other(i32),
}

impl Status {
    fn of_code(code: c_int) -> Self {
        match code {
            0 => Self::Success,
            5 => Self::Flushed,
            10 => Self::RemoteAccess,
            12 | 13 => Self::RetriesExceeded,
            1..=4 | 6 | 8 => Self::Local(code),
            other => Self::Other(other),
        }
    }
}

/// Which way work moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// A range of a part.
#[derive(Clone)]
pub(crate) struct LocalRange {
    pub(crate) part: Arc<Part>,
    /// From the part's start.
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

/// One work request: a range of the peer's memory, and where its bytes go to or come from here.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) way: Way,
    pub(crate) local: &'a [LocalRange],
    pub(crate) remote_address: u64,
    pub(crate) rkey: u32,
    /// Gives a completion even if it succeeds; else its end is known by that of later work.
    pub(crate) is_signalled: bool,
}

/// A completion queue with its channel.
struct Queue {
    raw: NonNull<abi::Queue>,
    channel: NonNull<abi::Channel>,
    context: Arc<Context>,
}

impl Queue {
    fn new(context: &Arc<Context>, entries: u32) -> io::Result<Self> {
        let functions = context.functions;
        // SAFETY: the context is open.
        let channel = made(unsafe { (functions.create_channel)(context.raw.as_ptr()) })?;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the context is open, the channel is of it.
        let raw = made(unsafe {
            (functions.create_queue)(context.raw.as_ptr(), entries, ptr::null_mut(), channel.as_ptr(), 0)
        });
        let raw = raw.inspect_err(|_| {
            // SAFETY: no queue uses the channel. A failure leaves nothing to do.
            let _ = unsafe { (functions.destroy_channel)(channel.as_ptr()) };
        })?;
        let queue = Self { raw, channel, context: Arc::clone(context) };
        set_nonblocking(queue.channel())?;
        Ok(queue)
    }

    fn channel(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open until the channel is destroyed, which the borrow outlives.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    fn poll(&self, out: &mut [MaybeUninit<abi::Completion>]) -> io::Result<usize> {
        let room = c_int::try_from(out.len()).unwrap_or(c_int::MAX);
        // SAFETY: the operation table is that of the open context; it writes at most `room` completions.
        let count = unsafe { (self.context.raw.as_ref().poll_cq)(self.raw.as_ptr(), room, out.as_mut_ptr().cast()) };
        usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(libc::EIO))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let functions = self.context.functions;
        // SAFETY: the queue pair that used the queue is gone (field order), its events are acknowledged as they are
        // taken, and neither queue nor channel is used after this.
        let destroyed = unsafe {
            check((functions.destroy_queue)(self.raw.as_ptr()))
                .and_then(|()| check((functions.destroy_channel)(self.channel.as_ptr())))
        };
        if let Err(error) = destroyed {
            tracing::warn!(%error, "RDMA completion queue can't be destroyed");
        }
    }
}

/// The raw queue pair, destroyed before what it uses.
struct RawPair {
    raw: NonNull<abi::Pair>,
    domain: Arc<Domain>,
    /// What posted work names, with the sequence number of the last work that does, in that order.
    lent: VecDeque<(u64, Arc<Part>)>,
}

impl Drop for RawPair {
    fn drop(&mut self) {
        // SAFETY: the pair is not used after this. When the call returns, the device takes no more from its queues and
        // touches no memory on its behalf.
        if let Err(error) = check(unsafe { (self.domain.context.functions.destroy_pair)(self.raw.as_ptr()) }) {
            tracing::error!(%error, "RDMA queue pair can't be destroyed: memory of its work is never freed");
            std::mem::forget(std::mem::take(&mut self.lent));
        }
    }
}

/// A reliable connected queue pair: created, then connected, then used, then stopped.
pub(crate) struct QueuePair {
    // Dropped in this order: the pair uses the queue.
    pair: RawPair,
    queue: Queue,
    port: u8,
    depth: u32,
    ranges: u32,
    inline_bytes: u32,
    /// Sequence number of the next work.
    next: u64,
    /// All work before this has ended.
    ended: u64,
    /// Some work failed: what has no completion of its own from here on was flushed.
    has_failed: bool,
    works: Vec<abi::Work>,
    local: Vec<abi::Range>,
}

// SAFETY: as for `Context`; the pointers in `works` and `local` are set and used within one call.
unsafe impl Send for QueuePair {}

/// How a queue pair talks to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Index of the own address in the port's table.
    pub(crate) gid_index: u8,
    pub(crate) mtu: PathMtu,
    /// Reads on their way that the other side issues here.
    pub(crate) reads_in: u8,
    /// Reads on their way that this side issues.
    pub(crate) reads_out: u8,
    /// Own first packet number, 24 bits.
    pub(crate) psn: u32,
    /// For an acknowledgement: 4.096 µs times two to this, 1 to 31. Waited for `retries + 1` times.
    pub(crate) timeout_exponent: u8,
    /// At most 6: some devices take 7 for ever.
    pub(crate) retries: u8,
}

impl QueuePair {
    /// Creates a pair that takes `depth` work requests of up to `ranges` local ranges at once, within the device's limits.
    /// With `serves`, the peer may read and write what is registered for it in the domain.
    pub(crate) fn new(domain: &Arc<Domain>, port: u8, depth: u32, ranges: u32, serves: bool) -> io::Result<Self> {
        let context = &domain.context;
        let (depth, ranges) = (depth.clamp(1, context.limits.work.max(1)), ranges.clamp(1, context.limits.ranges));
        // Every work may give a completion, if all fail.
        let queue = Queue::new(context, depth)?;
        let create = |inline_bytes| {
            let limits = abi::PairLimits {
                send_work: depth,
                receive_work: 0,
                send_ranges: ranges,
                receive_ranges: 0,
                inline_bytes,
            };
            let mut setup = abi::PairSetup {
                context: ptr::null_mut(),
                send_queue: queue.raw.as_ptr(),
                receive_queue: queue.raw.as_ptr(),
                shared_receive_queue: ptr::null_mut(),
                limits,
                pair_type: abi::PAIR_RELIABLE,
                signal_all: 0,
            };
            // SAFETY: domain and queue are alive and of one context; the function reads the setup and stores the limits
            // that it grants.
            let raw = made(unsafe { (context.functions.create_pair)(domain.raw.as_ptr(), &raw mut setup) })?;
            Ok((raw, setup.limits.inline_bytes))
        };
        // A device that can't do as much inline refuses.
        let (raw, inline_bytes) = create(INLINE_BYTES).or_else(|_: io::Error| create(0))?;
        let mut created = Self {
            pair: RawPair { raw, domain: Arc::clone(domain), lent: VecDeque::new() },
            queue,
            port,
            depth,
            ranges,
            inline_bytes,
            next: 0,
            ended: 0,
            has_failed: false,
            works: Vec::new(),
            local: Vec::new(),
        };
        let access = if serves { abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_WRITE } else { 0 };
        let set = abi::SET_STATE | abi::SET_PKEY_INDEX | abi::SET_PORT | abi::SET_ACCESS;
        created.modify(set, |attributes| {
            attributes.state = abi::STATE_INIT;
            attributes.port = port;
            attributes.access = access as u32;
        })?;
        Ok(created)
    }

    /// Its number, 24 bits.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the pair is alive, and its number does not change.
        unsafe { self.pair.raw.as_ref() }.number
    }

    /// Connects it to the peer's pair: it serves from here on.
    pub(crate) fn receive_from(&mut self, peer: &Endpoint, route: &Route) -> io::Result<()> {
        let set = abi::SET_STATE
            | abi::SET_ADDRESS
            | abi::SET_PATH_MTU
            | abi::SET_TARGET_NUMBER
            | abi::SET_RECEIVE_PSN
            | abi::SET_READS_IN
            | abi::SET_RNR_TIMER;
        let port = self.port;
        self.modify(set, |attributes| {
            attributes.state = abi::STATE_READY_TO_RECEIVE;
            attributes.path_mtu = c_int::from(route.mtu.code());
            attributes.target_number = peer.number;
            attributes.receive_psn = peer.psn;
            attributes.reads_in = route.reads_in;
            // 0.64 ms; nothing here waits for receives, but a value has to be there.
            attributes.receiver_not_ready_timer = 12;
            attributes.address.port = port;
            attributes.address.lid = peer.lid;
            attributes.address.is_global = u8::from(peer.link == LinkLayer::Ethernet);
            attributes.address.route.target = peer.gid;
            attributes.address.route.source_index = route.gid_index;
            attributes.address.route.hop_limit = 64;
        })
    }

    /// Lets it issue work too.
    pub(crate) fn send_to(&mut self, route: &Route) -> io::Result<()> {
        let set = abi::SET_STATE
            | abi::SET_TIMEOUT
            | abi::SET_RETRIES
            | abi::SET_RNR_RETRIES
            | abi::SET_SEND_PSN
            | abi::SET_READS_OUT;
        self.modify(set, |attributes| {
            attributes.state = abi::STATE_READY_TO_SEND;
            attributes.timeout = route.timeout_exponent;
            attributes.retries = route.retries;
            attributes.receiver_not_ready_retries = route.retries;
            attributes.send_psn = route.psn;
            attributes.reads_out = route.reads_out;
        })
    }

    fn modify(&mut self, set: c_int, fill: impl FnOnce(&mut abi::PairAttributes)) -> io::Result<()> {
        // SAFETY: made of numbers only, for which all zeros is valid.
        let mut attributes: abi::PairAttributes = unsafe { std::mem::zeroed() };
        fill(&mut attributes);
        let functions = self.pair.domain.context.functions;
        // SAFETY: the pair is alive; the function reads the fields that `set` names.
        check(unsafe { (functions.modify_pair)(self.pair.raw.as_ptr(), &raw mut attributes, set) })
    }

    /// Work that can be posted now.
    pub(crate) fn room(&self) -> usize {
        (u64::from(self.depth) - self.in_flight()) as usize
    }

    /// Work that has not ended.
    pub(crate) fn in_flight(&self) -> u64 {
        self.next - self.ended
    }

    /// Most local ranges of one work.
    pub(crate) fn ranges(&self) -> usize {
        self.ranges as usize
    }

    /// Posts all of `work` at once, as one list: at most [`QueuePair::room`]. Gives the sequence number of the first; they
    /// count up from there, and so do what [`QueuePair::poll`] gives.
    ///
    /// Writes that are small enough go inline: their bytes are copied here.
    ///
    /// # Errors
    /// Those of the device; then it is not known to the caller how many were posted, so [`QueuePair::stop`] has to follow.
    /// `InvalidInput` if a range leaves its part or there are too many; nothing was posted.
    pub(crate) fn post(&mut self, work: &[Work<'_>]) -> io::Result<u64> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if work.is_empty() || work.len() > self.room() || work.iter().any(|work| work.local.len() > self.ranges()) {
            return Err(invalid());
        }
        self.local.clear();
        for range in work.iter().flat_map(|work| work.local) {
            if !Arc::ptr_eq(&range.part.domain, &self.pair.domain) {
                return Err(invalid());
            }
            let address = range.part.address(range.offset, u64::from(range.length))?;
            // SAFETY: the registration is alive, and its keys don't change.
            let lkey = unsafe { range.part.raw.as_ref() }.lkey;
            self.local.push(abi::Range { address, length: range.length, lkey });
        }
        self.works.clear();
        let mut used = 0;
        for (sequence, work) in (self.next..).zip(work) {
            let ranges = &mut self.local[used..used + work.local.len()];
            used += work.local.len();
            let bytes: u64 = ranges.iter().map(|range| u64::from(range.length)).sum();
            let is_inline = work.way == Way::Write && bytes > 0 && bytes <= u64::from(self.inline_bytes);
            self.works.push(abi::Work {
                id: sequence,
                next: ptr::null_mut(),
                ranges: ranges.as_mut_ptr(),
                range_count: c_int::try_from(ranges.len()).map_err(|_| invalid())?,
                opcode: if work.way == Way::Read { abi::READ } else { abi::WRITE },
                flags: if work.is_signalled { abi::SEND_SIGNALLED } else { 0 }
                    | if is_inline { abi::SEND_INLINE } else { 0 },
                immediate: 0,
                remote_address: work.remote_address,
                rkey: work.rkey,
                rest: [0; 9],
            });
        }
        let first = self.works.as_mut_ptr();
        for index in 1..self.works.len() {
            // SAFETY: both places are inside `works`, which is not reallocated before the call below.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let sequence = self.next;
        // Before the device hears of it: should the call fail in the middle, some of it is on its way.
        for (sequence, work) in (sequence..).zip(work) {
            for range in work.local {
                match self.pair.lent.back_mut() {
                    Some((last, part)) if Arc::ptr_eq(part, &range.part) => *last = sequence,
                    _ => self.pair.lent.push_back((sequence, Arc::clone(&range.part))),
                }
            }
        }
        self.next += work.len() as u64;
        let mut bad = ptr::null_mut();
        // SAFETY: the operation table is that of the open context. The list, its ranges and the memory that inline work
        // is copied from are alive during the call; the memory of all other work is kept by `lent` until its completion
        // was polled or the pair is destroyed. Ranges were checked to lie in their parts, whose lkeys allow no more than
        // they were registered for.
        let posted =
            unsafe { (self.queue.context.raw.as_ref().post_send)(self.pair.raw.as_ptr(), first, &raw mut bad) };
        check(posted).map(|()| sequence)
    }

    /// Takes completions: one entry for each work that has ended, in order. Gives whether there were any.
    ///
    /// # Errors
    /// The device's; its queue is of no use any more.
    pub(crate) fn poll(&mut self, out: &mut Vec<(u64, Status)>) -> io::Result<bool> {
        let mut completions = [MaybeUninit::uninit(); COMPLETIONS];
        let count = self.queue.poll(&mut completions)?;
        for completion in &completions[..count] {
            // SAFETY: `poll` filled the first `count`.
            let completion = unsafe { completion.assume_init() };
            let (sequence, status) = (completion.id, Status::of_code(completion.status));
            if sequence < self.ended || sequence >= self.next {
                return Err(io::Error::from_raw_os_error(libc::EPROTO));
            }
            // Work without a completion of its own ended before: with success, unless the pair had failed by then.
            let before = if self.has_failed { Status::Flushed } else { Status::Success };
            out.extend((self.ended..sequence).map(|sequence| (sequence, before)));
            out.push((sequence, status));
            self.has_failed |= status != Status::Success;
            self.ended = sequence + 1;
        }
        while self.pair.lent.front().is_some_and(|(last, _)| *last < self.ended) {
            self.pair.lent.pop_front();
        }
        Ok(count > 0)
    }

    /// Asks for an event with the next completion. Poll once more after this, before waiting.
    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: the operation table is that of the open context.
        check(unsafe { (self.queue.context.raw.as_ref().req_notify_cq)(self.queue.raw.as_ptr(), 0) })
    }

    /// Readable when an event is there that was asked for.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.queue.channel()
    }

    /// Takes the events that are there.
    pub(crate) fn take_events(&self) {
        let functions = self.queue.context.functions;
        loop {
            let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is alive and does not block; the function stores which queue the event is of.
            let taken =
                unsafe { (functions.get_queue_event)(self.queue.channel.as_ptr(), &raw mut queue, &raw mut context) };
            if taken != 0 {
                return;
            }
            // SAFETY: the event is of this queue, the only one of the channel, and acknowledged once.
            unsafe { (functions.ack_queue_events)(queue, 1) };
        }
    }

    /// Moves it to the error state: what is on its way is flushed, nothing more leaves or is answered.
    pub(crate) fn stop(&mut self) -> io::Result<()> {
        self.modify(abi::SET_STATE, |attributes| attributes.state = abi::STATE_ERROR)
    }
}

#[cfg(test)]
mod tests;
