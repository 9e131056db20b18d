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
//!
//! Queue pairs and the work on them are in [`queue_pair`].
#![expect(unsafe_code, reason = "calls libibverbs through its C interface; each block is argued")]

mod queue_pair;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use super::abi;
use super::endpoint::{Gid, LinkLayer, PathMtu};
use crate::memory::Memory;

pub(crate) use queue_pair::{LocalRange, QueuePair, Route, Status, Way, Work};

/// Name that the library has had since its first version.
const LIBRARY: &str = "libibverbs.so.1";

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
