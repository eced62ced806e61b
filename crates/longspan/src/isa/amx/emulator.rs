//! AMX on CPUs that lack it, for tests: a SIGILL handler that executes its instructions.
//!
//! ```text
//! SIGILL → decode → tile registers of this thread, memory, vector registers → continue behind it
//! ```
//!
//! Kernels run as they were compiled, packing and assembly included, at about a microsecond per
//! instruction of the unit. Decoded is what kernels contain: `ldtilecfg`, `tilerelease`, `tilezero`,
//! `tileloadd`, `tilestored`, `tdpbf16ps`, and `vcvtne2ps2bf16` of AVX512-BF16. Any other instruction
//! ends the process as it would without the handler.

use std::arch::x86_64::__cpuid_count;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{array, mem, ptr};

use libc::{siginfo_t, ucontext_t};

/// Installs the handler for all threads of the process. Returns whether the system accepts it.
pub(super) fn install() -> bool {
    let [(_, has_tiles), _] = super::unit();
    CONFIGURES.store(has_tiles, Ordering::Relaxed);
    // SAFETY: a `sigaction` of zeros has no flags, an empty mask and no handler. The handler has the
    // signature that `SA_SIGINFO` demands, and touches its thread's tile registers and what the
    // instruction names.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = on_illegal_instruction as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGILL, &action, ptr::null_mut()) == 0
    }
}

/// Whether the CPU itself executes `ldtilecfg` and `tilerelease`, which need no permission.
static CONFIGURES: AtomicBool = AtomicBool::new(false);

extern "C" fn on_illegal_instruction(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: with `SA_SIGINFO` the system passes the context of the interrupted thread, which this call
    // alone uses. The CPU has fetched the instruction at `rip`, so it is readable. It is not one of this
    // handler, so nothing else uses the tile registers of the thread.
    unsafe {
        let context = &mut *context.cast::<ucontext_t>();
        match UNIT.with(|unit| execute(context, &mut *unit.get())) {
            Some(length) => context.uc_mcontext.gregs[libc::REG_RIP as usize] += length as i64,
            // The instruction is executed again, and ends the process.
            None => drop(libc::signal(libc::SIGILL, libc::SIG_DFL)),
        }
    }
}

const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

/// A row of a tile register.
type Row = [u8; ROW_BYTES];

/// The tile registers of a thread.
struct Unit {
    configured: bool,
    tiles: [[Row; ROWS]; 8],
}

thread_local! {
    static UNIT: UnsafeCell<Unit> =
        const { UnsafeCell::new(Unit { configured: false, tiles: [[[0; ROW_BYTES]; ROWS]; 8] }) };
}

impl Unit {
    /// The one configuration that kernels use: eight registers of 16 rows of 64 bytes.
    fn configure(&mut self, bytes: Row) -> Option<()> {
        let mut expected = [0; ROW_BYTES];
        expected[0] = 1;
        (16..32).step_by(2).for_each(|at| expected[at] = ROW_BYTES as u8);
        expected[48..56].fill(ROWS as u8);
        *self = Unit { configured: bytes == expected, tiles: [[[0; ROW_BYTES]; ROWS]; 8] };
        self.configured.then_some(())
    }

    fn tile(&mut self, tile: u8) -> Option<&mut [Row; ROWS]> {
        let configured = self.configured || CONFIGURES.load(Ordering::Relaxed);
        configured.then(|| self.tiles.get_mut(usize::from(tile)))?
    }

    /// `target += left · right`: products of even and of odd terms are summed apart. Subnormal operands and
    /// results are 0.
    fn multiply(&mut self, target: u8, left: u8, right: u8) -> Option<()> {
        let (left, right) = (*self.tile(left)?, *self.tile(right)?);
        let term = |row: &Row, at: usize| {
            let bits = u16::from_le_bytes([row[2 * at], row[2 * at + 1]]);
            normal(f32::from_bits(u32::from(bits) << 16))
        };
        for (row, left) in self.tile(target)?.iter_mut().zip(&left) {
            let mut sums = [[0.0_f32; 2]; ROWS];
            for (pair, right) in right.iter().enumerate() {
                for (column, sums) in sums.iter_mut().enumerate() {
                    for (half, sum) in sums.iter_mut().enumerate() {
                        let product = term(left, 2 * pair + half) * term(right, 2 * column + half);
                        *sum = normal(*sum + product);
                    }
                }
            }
            for (bytes, [even, odd]) in row.as_chunks_mut().0.iter_mut().zip(sums) {
                let sum = normal(f32::from_le_bytes(*bytes)) + normal(even + odd);
                *bytes = normal(sum).to_le_bytes();
            }
        }
        Some(())
    }
}

fn normal(x: f32) -> f32 {
    if x.is_subnormal() { 0.0_f32.copysign(x) } else { x }
}

/// Prefixes, as VEX and EVEX number them.
const NO_PREFIX: u8 = 0;
const F3: u8 = 2;
const F2: u8 = 3;

/// Executes the instruction at `rip` and returns its length; `None` where it is none of those listed.
///
/// # Safety
///
/// The context must be that of a signal's handler, and its instruction readable.
unsafe fn execute(context: &mut ucontext_t, unit: &mut Unit) -> Option<usize> {
    let code = context.uc_mcontext.gregs[libc::REG_RIP as usize] as *const u8;
    // SAFETY: bytes are read as far as the instruction goes, and memory is accessed where it would.
    unsafe {
        // Bits that extend the numbers of registers are inverted.
        let [prefix, first, second] = [*code, !*code.add(1), *code.add(2)];
        let (index, base) = (first >> 6 & 1, first >> 5 & 1);
        match prefix {
            // VEX, map 0F38, 128 bits, W 0.
            0xc4 if !first & 31 == 2 && second & 0x84 == 0 => {
                let operands = Operands::decode(context, code.add(4), [index, base], 1)?;
                let (tile, row_at) =
                    (operands.register, |address: u64, stride: u64, row: usize| {
                        address.wrapping_add(stride.wrapping_mul(row as u64)) as *mut Row
                    });
                match (second & 3, *code.add(3), operands.other) {
                    (NO_PREFIX, 0x49, Other::Memory { address, .. }) if tile == 0 => {
                        unit.configure((address as *const Row).read_unaligned())?;
                    }
                    (NO_PREFIX, 0x49, Other::Register(0)) if tile == 0 => unit.configured = false,
                    (F2, 0x49, Other::Register(0)) => unit.tile(tile)?.fill([0; ROW_BYTES]),
                    (F2, 0x4b, Other::Memory { address, stride }) => {
                        for (row, bytes) in unit.tile(tile)?.iter_mut().enumerate() {
                            *bytes = row_at(address, stride?, row).read_unaligned();
                        }
                    }
                    (F3, 0x4b, Other::Memory { address, stride }) => {
                        for (row, bytes) in unit.tile(tile)?.iter().enumerate() {
                            row_at(address, stride?, row).write_unaligned(*bytes);
                        }
                    }
                    (F3, 0x5c, Other::Register(left)) => {
                        unit.multiply(tile, left, !second >> 3 & 15)?;
                    }
                    _ => return None,
                }
                Some(4 + operands.length)
            }
            // EVEX, map 0F38, W 0, 512 bits, neither masked nor broadcast.
            0x62 if !first & 7 == 2 && second & 0x83 == F2 && *code.add(4) == 0x72 => {
                let third = *code.add(3);
                if third & 0xf7 != 0x40 {
                    return None;
                }
                let operands = Operands::decode(context, code.add(5), [index, base], ROW_BYTES)?;
                let low = match operands.other {
                    Other::Register(low) => read_vector(context, low | base << 3 | index << 4)?,
                    Other::Memory { address, .. } => (address as *const Row).read_unaligned(),
                };
                let high = read_vector(context, !second >> 3 & 15 | (!third >> 3 & 1) << 4)?;
                let source = |at: usize| if at < 16 { (low, at) } else { (high, at - 16) };
                let words: [u16; 32] = array::from_fn(|at| {
                    let (vector, at) = source(at);
                    to_bf16(vector.as_chunks().0[at])
                });
                let mut bytes = [0; ROW_BYTES];
                let (pairs, _) = bytes.as_chunks_mut();
                pairs.iter_mut().zip(words).for_each(|(pair, word)| *pair = word.to_le_bytes());
                let target = operands.register | (first >> 7) << 3 | (first >> 4 & 1) << 4;
                write_vector(context, target, bytes)?;
                Some(5 + operands.length)
            }
            _ => None,
        }
    }
}

/// Rounds to nearest, ties to even; subnormal numbers become 0, NaN a quiet one.
fn to_bf16(bytes: [u8; 4]) -> u16 {
    half::bf16::from_f32(normal(f32::from_le_bytes(bytes))).to_bits()
}

/// What ModRM, SIB and a displacement name.
struct Operands {
    /// The register in ModRM, without its extension.
    register: u8,
    other: Other,
    /// Bytes of ModRM, SIB and displacement.
    length: usize,
}

enum Other {
    /// Without its extension.
    Register(u8),
    /// Base and displacement, and the index times its factor, from one row of a tile to the next.
    Memory { address: u64, stride: Option<u64> },
}

impl Operands {
    /// `extensions` are those of index and base; a displacement of a byte counts in units of `unit` bytes.
    ///
    /// # Safety
    ///
    /// `code` must be the ModRM of an instruction that is readable.
    unsafe fn decode(
        context: &ucontext_t,
        code: *const u8,
        [index, base]: [u8; 2],
        unit: usize,
    ) -> Option<Self> {
        let general = |register: u8| general_register(context, register);
        // SAFETY: bytes are read as far as ModRM says that there are some.
        unsafe {
            let mod_rm = *code;
            let (mode, register, rm) = (mod_rm >> 6, mod_rm >> 3 & 7, mod_rm & 7);
            if mode == 3 {
                return Some(Operands { register, other: Other::Register(rm), length: 1 });
            }
            let (own, stride, read) = match rm {
                4 => {
                    let sib = *code.add(1);
                    let stepped = sib >> 3 & 7 | index << 3;
                    // Number 4 is no index.
                    let stride = (stepped != 4).then(|| general(stepped) << (sib >> 6));
                    (sib & 7, stride, 2)
                }
                _ => (rm, None, 1),
            };
            let (displacement, length) = match mode {
                // An address relative to `rip`, or without a base.
                0 if own == 5 => return None,
                0 => (0, read),
                1 => (i64::from(*code.add(read).cast::<i8>()) * unit as i64, read + 1),
                _ => {
                    let bytes = code.add(read).cast::<[u8; 4]>().read_unaligned();
                    (i64::from(i32::from_le_bytes(bytes)), read + 4)
                }
            };
            let address = general(own | base << 3).wrapping_add_signed(displacement);
            Some(Operands { register, other: Other::Memory { address, stride }, length })
        }
    }
}

fn general_register(context: &ucontext_t, register: u8) -> u64 {
    const ORDER: [c_int; 16] = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    context.uc_mcontext.gregs[ORDER[usize::from(register)] as usize] as u64
}

/// State components of vector registers: the upper halves of the first 16 `ymm`, of the first 16 `zmm`, and
/// the other `zmm`.
const YMM: u32 = 2;
const ZMM_UPPER: u32 = 6;
const ZMM_OTHERS: u32 = 7;

/// The pieces of a `zmm` register in the context, in their order: component, place and bytes.
///
/// # Safety
///
/// The context must be that of a signal's handler, on a CPU with AVX-512.
unsafe fn vector_pieces(
    context: &mut ucontext_t,
    register: u8,
) -> Option<[(Option<u32>, *mut u8, usize); 3]> {
    const XSAVE_MAGIC: u32 = 0x4650_5853;
    let register = usize::from(register);
    let state = context.uc_mcontext.fpregs.cast::<u8>();
    // SAFETY: the state begins with 512 bytes, of which the system describes those behind it in the last 48.
    // With the magic number, the components that `cpuid` places are there.
    unsafe {
        if state.is_null() || state.add(464).cast::<u32>().read() != XSAVE_MAGIC {
            return None;
        }
        let component = |component| state.add(__cpuid_count(0xd, component).ebx as usize);
        Some(match register {
            0..16 => [
                (None, state.add(160 + 16 * register), 16),
                (Some(YMM), component(YMM).add(16 * register), 16),
                (Some(ZMM_UPPER), component(ZMM_UPPER).add(32 * register), 32),
            ],
            _ => {
                let whole = component(ZMM_OTHERS).add(64 * (register - 16));
                let part = |at| (Some(ZMM_OTHERS), whole.wrapping_add(at), 16);
                [part(0), part(16), (Some(ZMM_OTHERS), whole.add(32), 32)]
            }
        })
    }
}

/// The components that aren't in their initial state, of zeros.
///
/// # Safety
///
/// [`vector_pieces`] must have found some.
unsafe fn components(context: &ucontext_t) -> *mut u64 {
    // SAFETY: behind the first 512 bytes is a header, which begins with them.
    unsafe { context.uc_mcontext.fpregs.cast::<u8>().add(512).cast() }
}

/// # Safety
///
/// That of [`vector_pieces`].
unsafe fn read_vector(context: &mut ucontext_t, register: u8) -> Option<Row> {
    let mut bytes = [0; ROW_BYTES];
    let mut at = 0;
    // SAFETY: as many bytes are read as a piece has; together these are a register's.
    unsafe {
        for (component, piece, length) in vector_pieces(context, register)? {
            if component.is_none_or(|bit| *components(context) >> bit & 1 == 1) {
                ptr::copy_nonoverlapping(piece, bytes[at..].as_mut_ptr(), length);
            }
            at += length;
        }
    }
    Some(bytes)
}

/// # Safety
///
/// That of [`vector_pieces`].
unsafe fn write_vector(context: &mut ucontext_t, register: u8, bytes: Row) -> Option<()> {
    // SAFETY: as many bytes are written as a piece has; together these are a register's. A component that was
    // in its initial state is zeros but for this register.
    unsafe {
        let mut at = 0;
        for (component, piece, length) in vector_pieces(context, register)? {
            if let Some(bit) = component {
                *components(context) |= 1 << bit;
            }
            ptr::copy_nonoverlapping(bytes[at..].as_ptr(), piece, length);
            at += length;
        }
    }
    Some(())
}
