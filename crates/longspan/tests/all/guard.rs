//! Not one element before or behind a buffer is read or written: pages that can't be touched lie
//! directly there.

use half::{bf16, f16};
use longspan::{
    Dims, GradientsMut, Hook, Inputs, Isa, Order, OutputGradient, OutputMut, OutputRef, View,
    ViewMut,
};
use longspan_testing::{AttentionCase, Rule, Transform, Values};

use crate::common::*;

/// Which end of a buffer touches a page without access.
#[derive(Debug, Clone, Copy)]
enum Side {
    Before,
    Behind,
}

/// Numbers between two pages that can't be touched, next to one of them.
struct Guarded<T> {
    map: *mut u8,
    bytes: usize,
    first: *mut T,
    len: usize,
}

fn page() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

impl<T: Copy> Guarded<T> {
    fn new(numbers: &[T], side: Side) -> Self {
        let page = page();
        let inner = size_of_val(numbers).next_multiple_of(page);
        let bytes = inner + 2 * page;
        // SAFETY: a new mapping, of which the middle is opened.
        let map = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let map = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let opened = inner == 0 || libc::mprotect(map.add(page), inner, access) == 0;
            assert!(opened, "{}", std::io::Error::last_os_error());
            map.cast::<u8>()
        };
        let offset = match side {
            Side::Before => page,
            Side::Behind => page + inner - size_of_val(numbers),
        };
        let first = map.wrapping_add(offset).cast::<T>();
        let mut guarded = Guarded { map, bytes, first, len: numbers.len() };
        guarded.slice().copy_from_slice(numbers);
        guarded
    }

    fn slice(&mut self) -> &mut [T] {
        // SAFETY: the opened part holds so many, and they are borrowed with the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.first, self.len) }
    }
}

impl<T: Number> Guarded<T> {
    fn poisoned(len: usize, side: Side) -> Self {
        Guarded::new(&vec![T::POISON; len], side)
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and no slice of it is left.
        unsafe { libc::munmap(self.map.cast(), self.bytes) };
    }
}

fn run<E: Number>(case: &AttentionCase, isa: Isa, order: Order, side: Side) -> Values<f32> {
    let problem = case.unmasked();
    let sizes = problem.sizes;
    let dense = |numbers: &[f32], dims| {
        let buffer = BufferOf::<E>::of(numbers, dims, Placement::Contiguous(order));
        let view = buffer.view();
        // SAFETY: a contiguous tensor is all of its elements one after the other.
        let numbers = unsafe { std::slice::from_raw_parts(view.as_ptr(), numbers.len()) };
        Guarded::new(numbers, side)
    };
    let (dq_dims, dk_dims) = (dims_q(&sizes), dims_k(&sizes));
    let (dv_dims, out_dims) = (dims_v(&sizes), dims_out(&sizes));
    let mut q = dense(&problem.q, dq_dims);
    let mut k = dense(&problem.k, dk_dims);
    let mut v = dense(&problem.v, dv_dims);
    let mut dout = dense(&problem.dout, out_dims);
    let mut dlse = problem.dlse.as_ref().map(|dlse| Guarded::new(dlse, side));
    let mut out = Guarded::<E>::poisoned(sizes.out(), side);
    let mut lse = Guarded::<f32>::poisoned(sizes.rows(), side);
    let mut lse_lo = Guarded::<f32>::poisoned(sizes.rows(), side);
    let mut dq = Guarded::<E>::poisoned(sizes.q(), side);
    let mut dk = Guarded::<E>::poisoned(sizes.k(), side);
    let mut dv = Guarded::<E>::poisoned(sizes.v(), side);

    let inputs = Inputs {
        q: View::new(q.slice(), dq_dims, order).unwrap(),
        k: View::new(k.slice(), dk_dims, order).unwrap(),
        v: View::new(v.slice(), dv_dims, order).unwrap(),
    };
    let attention = attention(case, isa, 2);
    let write = |guarded: &mut Guarded<E>, dims: Dims| {
        // SAFETY: each result is written through one view at a time.
        let slice = unsafe { std::slice::from_raw_parts_mut(guarded.first, guarded.len) };
        ViewMut::new(slice, dims, order).unwrap()
    };
    let output = OutputMut {
        out: write(&mut out, out_dims),
        lse: lse.slice(),
        lse_lo: Some(lse_lo.slice()),
    };
    attention.forward_into(inputs, output, Hook::none()).unwrap();
    let gradients = GradientsMut::new(
        write(&mut dq, dq_dims),
        write(&mut dk, dk_dims),
        write(&mut dv, dv_dims),
    );
    let (saved, gradient) = (
        OutputRef {
            out: View::new(out.slice(), out_dims, order).unwrap(),
            lse: lse.slice(),
            lse_lo: Some(lse_lo.slice()),
        },
        OutputGradient {
            dout: View::new(dout.slice(), out_dims, order).unwrap(),
            dlse: dlse.as_mut().map(|dlse| &*dlse.slice()),
        },
    );
    attention.backward_into(inputs, saved, gradient, gradients, Hook::none()).unwrap();
    let read = |guarded: &mut Guarded<E>| guarded.slice().iter().map(|x| x.to_f32()).collect();
    Values {
        out: read(&mut out),
        lse: lse.slice().to_vec(),
        dq: read(&mut dq),
        dk: read(&mut dk),
        dv: read(&mut dv),
        ..Values::default()
    }
}

fn cases() -> Vec<AttentionCase> {
    let local = Rule::And(vec![Rule::Causal, Rule::Window { left: 30, right: 0 }]);
    let mut cases = Vec::new();
    let sizes = [
        (1, 1, 1, 1),
        (2, 3, 2, 5),
        (17, 17, 7, 8),
        (63, 63, 16, 15),
        (64, 64, 64, 64),
        (65, 65, 33, 31),
        (1, 130, 17, 1),
        (97, 61, 80, 47),
        (127, 129, 96, 128),
        (31, 67, 3, 193),
    ];
    for (n, (tokens_q, tokens_k, dim_k, dim_v)) in sizes.into_iter().enumerate() {
        for rule in [Rule::Full, local.clone(), Rule::Strided { stride: 3 }] {
            let mut case = AttentionCase {
                heads_q: [1, 3, 4][n % 3],
                heads_kv: [1, 1, 2][n % 3],
                dim_k,
                dim_v,
                lse_gradient: n.is_multiple_of(2),
                ..AttentionCase::new("guarded", rule, tokens_k)
            };
            case.layout.tokens_q = tokens_q;
            case.layout.block = [16, 64, 100][n % 3];
            if n % 4 == 1 {
                case.transform = Transform::alibi(vec![0.25; case.heads_q]);
            }
            cases.push(case);
        }
    }
    cases
}

fn check_buffers<E: Number>(isas: &[Isa]) {
    for case in cases() {
        for &isa in isas {
            for order in [Order::Bshd, Order::Bhsd] {
                let behind = run::<E>(&case, isa, order, Side::Behind);
                let before = run::<E>(&case, isa, order, Side::Before);
                let what = format!("{isa}, {}, {order:?}, {case}", E::TYPE);
                assert_eq!(behind, before, "{what}");
                assert!(behind.out.iter().all(|x| x.is_finite()), "{what}");
            }
        }
    }
}

#[test]
fn nothing_outside_buffer_is_touched() {
    check_buffers::<f32>(&Isa::available());
}

/// Half types are read and written by other instructions on each set.
#[test]
fn nothing_outside_buffer_of_bf16_is_touched() {
    check_buffers::<bf16>(&Isa::available());
}

#[test]
fn nothing_outside_buffer_of_f16_is_touched() {
    check_buffers::<f16>(&Isa::available());
}

/// The guard does what the test relies on: a child that steps over it dies of it.
#[test]
fn the_guard_guards() {
    for side in [Side::Before, Side::Behind] {
        let guarded = Guarded::new(&[1.0_f32; 100], side);
        let outside = match side {
            Side::Before => guarded.first.wrapping_sub(1),
            Side::Behind => guarded.first.wrapping_add(100),
        };
        // SAFETY: the child does nothing but read, and is expected to die of it.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                // A sanitizer would turn the signal into a report.
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
                std::ptr::read_volatile(outside);
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
        assert!(matches!(signal, Some(libc::SIGSEGV | libc::SIGBUS)), "{side:?}: {status:#x}");
    }
}
