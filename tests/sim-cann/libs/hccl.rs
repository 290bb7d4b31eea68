//! libhccl.so: communicators, each with two device buffers that come from the runtime directly (module 3),
//! and collectives that answer as if every rank had sent what this one did.

#![allow(non_snake_case)]

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use sim_cann::acl;
use sim_cann::ffi::{Address, Out, Text, put, put_text};
use sim_cann::hal::module;
use sim_cann::rt::{self, policy};
use sim_cann::{settings, trace};

const SUCCESS: i32 = 0;
const PARAMETER_ERROR: i32 = 1;
const MEMORY_ERROR: i32 = 3;
const RUNTIME_ERROR: i32 = 15;

const NAME_ROOM: usize = 128;
const ROOT_INFO_SIZE: usize = 4108;

struct Communicator {
    ranks: u32,
    rank: u32,
    buffers: Vec<Address>,
    name: String,
}

impl Drop for Communicator {
    fn drop(&mut self) {
        for buffer in self.buffers.drain(..) {
            rt::rtFree(buffer);
        }
    }
}

/// `HcclComm`.
type Comm<'a> = Option<&'a Communicator>;

fn create(ranks: u32, rank: u32, out: Out<Box<Communicator>>) -> i32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let size = settings::get("HCCL_BUFFSIZE", 200u64) << 20;
    let call = trace::enter("HcclCommInit").num("ranks", ranks).num("rank", rank).num("buffer", size);
    let Some(out) = out else { return call.done(PARAMETER_ERROR) };
    let name = format!("sim_cann_comm_{}", NEXT.fetch_add(1, Relaxed));
    let mut communicator = Box::new(Communicator { ranks, rank, buffers: Vec::new(), name });
    for _ in 0..2 {
        let mut address = std::mem::MaybeUninit::new(0);
        if rt::rtMalloc(Some(&mut address), size, policy::HUGE_FIRST, module::HCCL) != rt::OK {
            return call.done(MEMORY_ERROR);
        }
        // SAFETY: initialised above.
        communicator.buffers.push(unsafe { address.assume_init() });
    }
    out.write(communicator);
    call.done(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn HcclGetRootInfo(info: Out<[u8; ROOT_INFO_SIZE]>) -> i32 {
    if put(info, [1; ROOT_INFO_SIZE]) { SUCCESS } else { PARAMETER_ERROR }
}

#[unsafe(no_mangle)]
extern "C" fn HcclCommInitRootInfo(
    ranks: u32,
    _info: Address,
    rank: u32,
    out: Out<Box<Communicator>>,
) -> i32 {
    create(ranks, rank, out)
}

#[unsafe(no_mangle)]
extern "C" fn HcclCommInitRootInfoConfig(
    ranks: u32,
    _info: Address,
    rank: u32,
    _config: Address,
    out: Out<Box<Communicator>>,
) -> i32 {
    create(ranks, rank, out)
}

#[unsafe(no_mangle)]
extern "C" fn HcclCommInitClusterInfoConfig(
    _path: Text,
    rank: u32,
    _config: Address,
    out: Out<Box<Communicator>>,
) -> i32 {
    create(1, rank, out)
}

#[unsafe(no_mangle)]
extern "C" fn HcclCreateSubCommConfig(
    _parent: Address,
    ranks: u32,
    _members: Address,
    _id: u64,
    rank: u32,
    _config: Address,
    out: Out<Box<Communicator>>,
) -> i32 {
    create(ranks, rank, out)
}

#[unsafe(no_mangle)]
extern "C" fn HcclCommDestroy(communicator: Option<Box<Communicator>>) -> i32 {
    let call = trace::enter("HcclCommDestroy");
    drop(communicator);
    call.done(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn HcclGetCommName(communicator: Comm, name: Address) -> i32 {
    let Some(communicator) = communicator else { return PARAMETER_ERROR };
    put_text(name, NAME_ROOM, &communicator.name);
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn HcclGetCommAsyncError(_communicator: Comm, error: Out<i32>) -> i32 {
    if put(error, SUCCESS) { SUCCESS } else { PARAMETER_ERROR }
}

#[unsafe(no_mangle)]
extern "C" fn HcclGetErrorString(_error: i32) -> Text {
    Text::of(c"simulated")
}

/// Bytes of one element of an `HcclDataType`.
fn element_size(data_type: i32) -> usize {
    match data_type {
        0 | 7 => 1,
        1 | 3 | 11 => 2,
        2 | 4 | 9 => 4,
        5 | 6 | 10 => 8,
        _ => 1,
    }
}

/// Moves `count` elements from `source` to `target` on the stream.
fn transfer(target: Address, source: Address, count: u64, data_type: i32, stream: Address) -> i32 {
    const DEVICE_TO_DEVICE: u32 = 3;
    let bytes = count * element_size(data_type) as u64;
    let error = rt::rtMemcpyAsync(target, bytes, source, bytes, DEVICE_TO_DEVICE, stream);
    if error == acl::OK { SUCCESS } else { RUNTIME_ERROR }
}

#[unsafe(no_mangle)]
extern "C" fn HcclAllReduce(
    send: Address,
    receive: Address,
    count: u64,
    data_type: i32,
    _operation: i32,
    _communicator: Comm,
    stream: Address,
) -> i32 {
    trace::enter("HcclAllReduce")
        .num("send", send)
        .num("recv", receive)
        .num("count", count)
        .num("type", data_type)
        .done(transfer(receive, send, count, data_type, stream))
}

#[unsafe(no_mangle)]
extern "C" fn HcclAllGather(
    send: Address,
    receive: Address,
    count: u64,
    data_type: i32,
    communicator: Comm,
    stream: Address,
) -> i32 {
    let call = trace::enter("HcclAllGather").num("send", send).num("recv", receive).num("count", count);
    let Some(communicator) = communicator else { return call.done(PARAMETER_ERROR) };
    let bytes = count as usize * element_size(data_type);
    let parts = (0..communicator.ranks as usize).map(|rank| receive + rank * bytes);
    let worst = parts.map(|part| transfer(part, send, count, data_type, stream)).max();
    call.done(worst.unwrap_or(SUCCESS))
}

#[unsafe(no_mangle)]
extern "C" fn HcclReduceScatter(
    send: Address,
    receive: Address,
    count: u64,
    data_type: i32,
    _operation: i32,
    communicator: Comm,
    stream: Address,
) -> i32 {
    let call = trace::enter("HcclReduceScatter").num("send", send).num("recv", receive).num("count", count);
    let Some(communicator) = communicator else { return call.done(PARAMETER_ERROR) };
    let own = send + communicator.rank as usize * count as usize * element_size(data_type);
    call.done(transfer(receive, own, count, data_type, stream))
}

#[unsafe(no_mangle)]
extern "C" fn HcclBroadcast(
    buffer: Address,
    count: u64,
    data_type: i32,
    root: u32,
    _communicator: Comm,
    stream: Address,
) -> i32 {
    trace::enter("HcclBroadcast")
        .num("buffer", buffer)
        .num("count", count)
        .num("root", root)
        .done(transfer(buffer, buffer, count, data_type, stream))
}
