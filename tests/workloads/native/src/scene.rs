//! The scenes.

use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use serde_json::json;

use crate::cann::{self, Address, KernelArgs, PhysicalProp, Text, check};
use crate::truth::{Block, Tally, Truth, cpu_ns, monotonic_ns};
use crate::{faults, stacks, switches};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

#[derive(Debug, Subcommand)]
pub enum Scene {
    /// Allocates and frees COUNT times, and tells the time of a pair
    Pairs {
        count: u64,
        #[arg(long, default_value_t = 2 * MIB)]
        size: usize,
    },
    /// Steps that free what they allocate, but for some blocks of some steps
    Leak {
        #[arg(long, default_value_t = 10)]
        steps: u64,
        /// Wraps each step in an mstx range "step start" and marks its middle
        #[arg(long)]
        marks: bool,
        /// Pause in each step, milliseconds
        #[arg(long, default_value_t = 10)]
        step_ms: u64,
    },
    /// Allocates until the device is full, frees, and allocates again
    Oom {
        #[arg(long, default_value_t = 1024 * MIB)]
        size: usize,
    },
    /// THREADS threads allocate and free COUNT times each, at once
    Threads {
        threads: u64,
        count: u64,
        #[arg(long, default_value_t = 64 * KIB)]
        size: usize,
        /// Another thread frees what a thread allocated
        #[arg(long)]
        handoff: bool,
    },
    /// Allocates on the device and on the next one, by set-device, by context and by thread
    TwoDevices,
    /// Pinned host memory: allocated, and registered
    Pinned,
    /// Physical memory apart from addresses: reserve, create, map, retain, unmap, release
    Vmm,
    /// Memory of other owners than the user: HCCL's and GE's, straight from the runtime
    Owners,
    /// MindSpore's pool, loaded only now
    Mindspore,
    /// Operators of ATB with packs of tensors
    Atb,
    /// Launches COUNT kernels, in three ways by turns, with copies between
    Kernel { count: u64 },
    /// ROUNDS of allocations with known stacks; each but the first waits for the file GATES/ROUND
    Stacks {
        gates: PathBuf,
        #[arg(long, default_value_t = 2)]
        rounds: u32,
    },
    /// Writes to COUNT blocks and checks them before they are freed
    Verify { count: u64 },
    /// STEPS with operators, marks and kernels whose names mean harm
    Hostile { steps: u64 },
    /// Two threads hand a byte to and fro COUNT times, and the time of a turn is told
    PingPong { count: u64 },
    /// Does nothing
    Sleep { seconds: f64 },
}

impl Scene {
    /// Plays the scene once, on `device`, which is the current one.
    pub fn play(&self, device: i32, truth: &Truth) -> anyhow::Result<Tally> {
        match *self {
            Self::Stacks { ref gates, rounds } => stacks::play(device, rounds, gates, truth),
            Self::Pairs { count, size } => pairs(count, size, truth),
            Self::Leak { steps, marks, step_ms } => leak(device, steps, marks, step_ms, truth),
            Self::Oom { size } => out_of_memory(size, truth),
            Self::Threads { threads, count, size, handoff: false } => {
                at_once(device, threads, count, size, truth)
            }
            Self::Threads { threads, count, size, handoff: true } => handoff(device, threads, count, size),
            Self::TwoDevices => two_devices(device, truth),
            Self::Pinned => pinned(device),
            Self::Vmm => vmm(device, truth),
            Self::Owners => owners(device, truth),
            Self::Mindspore => mindspore(device, truth),
            Self::Atb => packs(),
            Self::Kernel { count } => kernels(count),
            Self::Verify { count } => faults::verify(count, truth),
            Self::Hostile { steps } => faults::hostile(device, steps, truth),
            Self::PingPong { count } => switches::ping_pong(count, truth),
            Self::Sleep { seconds } => {
                std::thread::sleep(Duration::from_secs_f64(seconds));
                Ok(Tally::default())
            }
        }
    }
}

fn pairs(count: u64, size: usize, truth: &Truth) -> anyhow::Result<Tally> {
    let (begin, cpu) = (monotonic_ns(), cpu_ns());
    for _ in 0..count {
        cann::free(cann::allocate(size)?)?;
    }
    let each = |from: u64, to: u64| (to - from) as f64 / count.max(1) as f64;
    let time = json!({ "ns_per_pair": each(begin, monotonic_ns()), "cpu_ns_per_pair": each(cpu, cpu_ns()) });
    truth.tell("pairs", time)?;
    Ok(Tally { allocations: count, frees: count, ..Tally::default() })
}

/// Steps count from 1. Every step uses three blocks and frees them; steps 1, 4, 7, … keep 1 MiB, steps 2, 7,
/// 12, … keep 3 MiB and 96 KiB; step 3 makes 8 MiB of state that stays; 2 MiB a step are freed two steps late.
fn leak(device: i32, steps: u64, marks: bool, step_ms: u64, truth: &Truth) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let mut late = std::collections::VecDeque::new();
    for step in 1..=steps {
        let range = marks.then(|| cann::mstxRangeStartA(c"step start".into(), 0));
        let mut held = Vec::new();
        for size in [4 * MIB, 512 * KIB, 3 * MIB / 2] {
            held.push(cann::allocate(size)?);
        }
        late.push_back(cann::allocate(2 * MIB)?);
        tally.allocations += 4;

        let mut keep = |size, kind: &str| -> anyhow::Result<()> {
            let block = Block { ptr: cann::allocate(size)?, size, device, step: Some(step) };
            tally.allocations += 1;
            truth.tell(kind, &block)?;
            if kind == "leak" {
                tally.leaked.push(block);
            }
            Ok(())
        };
        if step == 3 {
            keep(8 * MIB, "state")?;
        }
        if step % 3 == 1 {
            keep(MIB, "leak")?;
        }
        if step % 5 == 2 {
            keep(3 * MIB, "leak")?;
            keep(96 * KIB, "leak")?;
        }
        if marks {
            let text = CString::new(format!("batch {step}"))?;
            cann::mstxMarkA(Text::from(text.as_c_str()), 0);
        }
        std::thread::sleep(Duration::from_millis(step_ms));
        if late.len() > 2 {
            held.extend(late.pop_front());
        }
        for address in held {
            cann::free(address)?;
            tally.frees += 1;
        }
        if let Some(range) = range {
            cann::mstxRangeEnd(range);
        }
    }
    for address in late {
        cann::free(address)?;
        tally.frees += 1;
    }
    Ok(tally)
}

fn out_of_memory(size: usize, truth: &Truth) -> anyhow::Result<Tally> {
    let mut held = Vec::new();
    let code = loop {
        let mut address = 0;
        match cann::aclrtMalloc(&mut address, size, 0) {
            0 => held.push(address),
            code => break code,
        }
    };
    truth.tell("oom", json!({ "blocks": held.len(), "size": size, "code": code }))?;
    if code != cann::OUT_OF_MEMORY {
        bail!("aclrtMalloc answered {code}, not {}", cann::OUT_OF_MEMORY);
    }
    let count = held.len() as u64;
    for address in held {
        cann::free(address)?;
    }
    cann::free(cann::allocate(size)?)?;
    Ok(Tally { allocations: count + 1, frees: count + 1, failures: 1, ..Tally::default() })
}

fn at_once(device: i32, threads: u64, count: u64, size: usize, truth: &Truth) -> anyhow::Result<Tally> {
    let begin = monotonic_ns();
    let work = move || -> anyhow::Result<()> {
        check(cann::aclrtSetDevice(device), "aclrtSetDevice")?;
        for _ in 0..count {
            cann::free(cann::allocate(size)?)?;
        }
        Ok(())
    };
    let workers: Vec<_> = (0..threads).map(|_| std::thread::spawn(work)).collect();
    for worker in workers {
        worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
    }
    let total = threads * count;
    let each = (monotonic_ns() - begin) as f64 / total.max(1) as f64;
    truth.tell("threads", json!({ "threads": threads, "ns_per_pair": each }))?;
    Ok(Tally { allocations: total, frees: total, ..Tally::default() })
}

fn handoff(device: i32, threads: u64, count: u64, size: usize) -> anyhow::Result<Tally> {
    let (sender, receiver) = mpsc::channel();
    let make = move |sender: mpsc::Sender<Address>| -> anyhow::Result<()> {
        check(cann::aclrtSetDevice(device), "aclrtSetDevice")?;
        for _ in 0..count {
            sender.send(cann::allocate(size)?)?;
        }
        Ok(())
    };
    let workers: Vec<_> =
        (0..threads).map(|_| sender.clone()).map(|s| std::thread::spawn(move || make(s))).collect();
    drop(sender);
    let mut tally = Tally::default();
    for address in receiver {
        cann::free(address)?;
        tally.frees += 1;
    }
    for worker in workers {
        worker.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        tally.allocations += count;
    }
    Ok(tally)
}

fn two_devices(device: i32, truth: &Truth) -> anyhow::Result<Tally> {
    let other = device + 1;
    let mut tally = Tally::default();
    let mut keep = |device: i32, size: usize| -> anyhow::Result<()> {
        let block = Block { ptr: cann::allocate(size)?, size, device, step: None };
        truth.tell("leak", &block)?;
        tally.allocations += 1;
        tally.leaked.push(block);
        Ok(())
    };
    keep(device, MIB)?;
    check(cann::aclrtSetDevice(other), "aclrtSetDevice")?;
    keep(other, 2 * MIB)?;
    let mut context = 0;
    check(cann::aclrtCreateContext(&mut context, device), "aclrtCreateContext")?;
    keep(device, 3 * MIB)?;
    check(cann::aclrtSetDevice(other), "aclrtSetDevice")?;
    keep(other, 4 * MIB)?;
    // A thread of its own has no device until it takes over a context.
    let worker = std::thread::spawn(move || -> anyhow::Result<(Address, i32)> {
        check(cann::aclrtSetCurrentContext(context), "aclrtSetCurrentContext")?;
        Ok((cann::allocate(5 * MIB)?, device))
    });
    let (ptr, device_of_thread) = worker.join().map_err(|_| anyhow::anyhow!("the worker panicked"))??;
    let block = Block { ptr, size: 5 * MIB, device: device_of_thread, step: None };
    truth.tell("leak", &block)?;
    tally.allocations += 1;
    tally.leaked.push(block);
    check(cann::aclrtSetDevice(device), "aclrtSetDevice")?;
    Ok(tally)
}

fn pinned(device: i32) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    let mut keep = None;
    for size in [64 * KIB, MIB, 8 * MIB] {
        let mut address = 0;
        check(cann::aclrtMallocHost(&mut address, size), "aclrtMallocHost")?;
        tally.allocations += 1;
        if let Some(last) = keep.replace((address, size)) {
            check(cann::aclrtFreeHost(last.0), "aclrtFreeHost")?;
            tally.frees += 1;
        }
    }
    tally.leaked.extend(keep.map(|(ptr, size)| Block { ptr, size, device, step: None }));

    let memory = vec![0u8; MIB];
    let mut seen = 0;
    let source = memory.as_ptr() as Address;
    check(cann::aclrtHostRegister(source, MIB as u64, 0, &mut seen), "aclrtHostRegister")?;
    check(cann::aclrtHostUnregister(source), "aclrtHostUnregister")?;
    Ok(tally)
}

/// One handle of 8 MiB mapped twice and retained once, so released twice; one of 4 MiB leaked.
fn vmm(device: i32, truth: &Truth) -> anyhow::Result<Tally> {
    const HBM_HUGE: u32 = 4;
    let prop = PhysicalProp {
        handle_kind: 0,
        allocation_kind: 0,
        attribute: HBM_HUGE,
        device: device as u32,
        location_kind: 1,
        reserved: 0,
        reserve: 0,
    };
    let create = |size: usize| -> anyhow::Result<Address> {
        let mut handle = 0;
        check(cann::aclrtMallocPhysical(&mut handle, size, &prop, 0), "aclrtMallocPhysical")?;
        Ok(handle)
    };
    let (mut range, mut retained) = (0, 0);
    check(cann::aclrtReserveMemAddress(&mut range, 32 * MIB, 0, 0, 0), "aclrtReserveMemAddress")?;
    let handle = create(8 * MIB)?;
    for at in [range, range + 8 * MIB] {
        check(cann::aclrtMapMem(at, 8 * MIB, 0, handle, 0), "aclrtMapMem")?;
        check(cann::aclrtMemset(at, 8 * MIB, 1, 8 * MIB), "aclrtMemset")?;
    }
    let found = cann::aclrtMemRetainAllocationHandle(range + MIB, &mut retained);
    check(found, "aclrtMemRetainAllocationHandle")?;
    for at in [range, range + 8 * MIB] {
        check(cann::aclrtUnmapMem(at), "aclrtUnmapMem")?;
    }
    for handle in [handle, retained] {
        check(cann::aclrtFreePhysical(handle), "aclrtFreePhysical")?;
    }
    check(cann::aclrtReleaseMemAddress(range), "aclrtReleaseMemAddress")?;

    let block = Block { ptr: create(4 * MIB)?, size: 4 * MIB, device, step: None };
    truth.tell("leak", &block)?;
    Ok(Tally { allocations: 2, frees: 1, leaked: vec![block], ..Tally::default() })
}

fn owners(device: i32, truth: &Truth) -> anyhow::Result<Tally> {
    const OWNERS: [(&str, u16, usize); 2] = [("HCCL", 3, 5 * MIB), ("GE", 45, 3 * MIB)];
    let mut tally = Tally::default();
    for (name, module, size) in OWNERS {
        let mut held = [0; 2];
        for address in &mut held {
            check(cann::rtMalloc(address, size as u64, 0, module), "rtMalloc")?;
            tally.allocations += 1;
        }
        let [first, ptr] = held;
        check(cann::rtFree(first), "rtFree")?;
        tally.frees += 1;
        let block = Block { ptr, size, device, step: None };
        truth.tell("leak", json!({ "owner": name, "module": module, "block": &block }))?;
        tally.leaked.push(block);
    }
    Ok(tally)
}

/// The symbols at `names` in a library that is loaded now.
pub fn load<const N: usize>(library: &CStr, names: [&CStr; N]) -> anyhow::Result<[Address; N]> {
    // SAFETY: loads a library that has no constructors of its own; both strings are NUL-terminated.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        bail!("cannot load {library:?}: is it on the library path?");
    }
    // SAFETY: `handle` was just opened; the names are NUL-terminated.
    let found = names.map(|name| unsafe { libc::dlsym(handle, name.as_ptr()) } as Address);
    if found.contains(&0) {
        bail!("{library:?} lacks one of {names:?}");
    }
    Ok(found)
}

fn mindspore(device: i32, truth: &Truth) -> anyhow::Result<Tally> {
    type Alloc = extern "C" fn(Address, usize, bool, bool, u32) -> Address;
    type Free = extern "C" fn(Address, &Address);
    let names = [
        c"_ZN9mindspore6device22AbstractDynamicMemPool14AllocTensorMemEmbbj",
        c"_ZN9mindspore6device22AbstractDynamicMemPool13FreeTensorMemERKPv",
    ];
    let [alloc, free] = load(c"libmindspore_memory_pool.so", names)?;
    // SAFETY: these are the signatures of the two methods; the pool they act on is the library's own.
    let (alloc, free) =
        unsafe { (std::mem::transmute::<Address, Alloc>(alloc), std::mem::transmute::<Address, Free>(free)) };
    let mut tally = Tally::default();
    let mut allocate = |size| match alloc(0, size, false, true, 0) {
        0 => bail!("the pool has no {size} bytes"),
        address => {
            tally.allocations += 1;
            Ok(address)
        }
    };
    let held = [allocate(MIB)?, allocate(100)?, allocate(48 * MIB)?];
    let block = Block { ptr: allocate(700 * KIB)?, size: 700 * KIB, device, step: None };
    for address in held {
        free(0, &address);
        tally.frees += 1;
    }
    truth.tell("leak", &block)?;
    tally.leaked.push(block);
    Ok(tally)
}

/// An `atb::Tensor`: what it is (80 bytes of type, format and shape), and where.
#[repr(C)]
#[derive(Clone, Copy)]
struct AtbTensor {
    description: [u64; 10],
    device: Address,
    host: Address,
    bytes: u64,
}

/// `atb::SVector<atb::Tensor>`, as its header has it: up to 64 tensors in place, more elsewhere.
#[repr(C)]
struct AtbTensors {
    capacity: usize,
    size: usize,
    room: [AtbTensor; 65],
    elsewhere: *const AtbTensor,
}

impl AtbTensors {
    fn of(blocks: &[Address], bytes: u64, elsewhere: &mut Vec<AtbTensor>) -> Self {
        let tensor = |device| AtbTensor { description: [0; 10], device, host: 0, bytes };
        let mut vector =
            Self { capacity: 64, size: blocks.len(), room: [tensor(0); 65], elsewhere: std::ptr::null() };
        if blocks.len() <= vector.capacity {
            vector.room.iter_mut().zip(blocks).for_each(|(room, block)| *room = tensor(*block));
        } else {
            *elsewhere = blocks.iter().map(|block| tensor(*block)).collect();
            (vector.capacity, vector.elsewhere) = (elsewhere.len(), elsewhere.as_ptr());
        }
        vector
    }
}

/// An operator with two inputs and an output, one with more inputs than are in place, and one whose pack is nonsense.
///
/// Not inlined: packs are so large that the stacks of all scenes would be longer than what is copied of a stack.
#[inline(never)]
fn packs() -> anyhow::Result<Tally> {
    type Execute = extern "C" fn(&[Address; 5], &[AtbTensors; 2], Address, u64, Address) -> i32;
    let [execute] =
        load(c"libatb.so", [c"_ZN3atb13OperationBase7ExecuteERKNS_11VariantPackEPhmPNS_7ContextE"])?;
    // SAFETY: the signature of the method, with an object that begins with its table and its name, a `std::string`.
    let execute = unsafe { std::mem::transmute::<Address, Execute>(execute) };
    let [a, b, c] = [64 * KIB, 64 * KIB, 64 * KIB].map(cann::allocate);
    let [a, b, c] = [a?, b?, c?];
    let mut elsewhere = Vec::new();
    for (name, inputs) in [(c"LinearOperation", vec![a, b]), (c"GatherOperation", [a].repeat(70))] {
        let object = [0, name.as_ptr() as Address, name.count_bytes(), 0, 0];
        let pack = [
            AtbTensors::of(&inputs, 64 * KIB as u64, &mut elsewhere),
            AtbTensors::of(&[c], 1 << 10, &mut Vec::new()),
        ];
        check(execute(&object, &pack, 0, 0, 0), "Execute")?;
    }
    let object = [0, c"NonsenseOperation".as_ptr() as Address, 17, 0, 0];
    let mut pack = [&[a], &[c]].map(|blocks| AtbTensors::of(blocks, 1, &mut Vec::new()));
    pack[1].size = usize::MAX;
    check(execute(&object, &pack, 0, 0, 0), "Execute")?;
    for block in [a, b, c] {
        cann::free(block)?;
    }
    Ok(Tally { allocations: 3, frees: 3, ..Tally::default() })
}

/// The host stub of the kernel `fill`, as a compiler would make it.
#[unsafe(no_mangle)]
extern "C" fn aclrtlaunch_fill() {}

fn kernels(count: u64) -> anyhow::Result<Tally> {
    const HOST_TO_DEVICE: u32 = 1;
    const BLOCKS: u32 = 8;
    let (mut binary, mut function) = (0, 0);
    check(cann::aclrtBinaryLoadFromData(0, 0, 0, &mut binary), "aclrtBinaryLoadFromData")?;
    let found = cann::aclrtBinaryGetFunction(binary, c"scale_add_1f2e3d".into(), &mut function);
    check(found, "aclrtBinaryGetFunction")?;
    let stub = aclrtlaunch_fill as *const () as Address;
    check(cann::rtFunctionRegister(binary, stub, c"fill".into(), 0, 0), "rtFunctionRegister")?;

    let (input, output) = (cann::allocate(64 * KIB)?, cann::allocate(64 * KIB)?);
    let source = vec![0u8; 64 * KIB];
    let args = [input, output];
    let (block, size) = (args.as_ptr() as Address, size_of_val(&args));
    let extended = KernelArgs { args: block, host_inputs: 0, size: size as u32, rest: [0; 5] };
    for index in 0..count {
        let code = match index % 3 {
            0 => cann::aclrtLaunchKernelWithHostArgs(function, BLOCKS, 0, 0, block, size, 0, 0),
            1 => cann::rtKernelLaunch(stub, BLOCKS, block, size as u32, 0, 0),
            _ => cann::rtKernelLaunchWithHandleV2(binary, index, BLOCKS, &extended, 0, 0, 0),
        };
        check(code, "a launch").with_context(|| format!("launch {index}"))?;
        if index % 100 == 0 {
            let from = source.as_ptr() as Address;
            let copied = cann::aclrtMemcpyAsync(input, source.len(), from, source.len(), HOST_TO_DEVICE, 0);
            check(copied, "aclrtMemcpyAsync")?;
        }
    }
    check(cann::aclrtSynchronizeStream(0), "aclrtSynchronizeStream")?;
    cann::free(input)?;
    cann::free(output)?;
    Ok(Tally { allocations: 2, frees: 2, launches: count, ..Tally::default() })
}
