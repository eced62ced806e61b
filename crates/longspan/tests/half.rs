//! bf16 and f16 against the `f64` oracle, on every instruction set of this CPU.
//!
//! The rule is that of [`Measure`](longspan_testing::Measure): rounding once is all that those cost
//! who widen, besides what the rounded output costs gradients; AMX multiplies probabilities and
//! their gradients as bf16, and may be off by what that is expected to cost.

use half::{bf16, f16};
use longspan_testing::{AttentionCase, Measure, Rule, Sample, attention_cases, naive, truth};

mod common;

use common::*;

/// Random cases of each type, from seeds that f32 isn't tested with by default.
fn random() -> impl Iterator<Item = AttentionCase> {
    let (first, cases) = (number("LONGSPAN_SEED", 1000), number("LONGSPAN_CASES", 400) / 8);
    (first..first + cases.max(1)).map(AttentionCase::from_seed)
}

/// The table without its longest cases, which take most of its time; long rows have their own test.
fn table() -> impl Iterator<Item = AttentionCase> {
    let pairs = |case: &AttentionCase| case.sizes().tokens_q * case.sizes().tokens_k;
    attention_cases().into_iter().filter(move |case| pairs(case) <= 1 << 20)
}

#[test]
fn even_table_of_bf16() {
    check_all::<bf16>(table().step_by(2));
}

#[test]
fn odd_table_of_bf16() {
    check_all::<bf16>(table().skip(1).step_by(2));
}

/// Where f16 differs from bf16 is in two conversions: a third of the table.
#[test]
fn table_of_f16() {
    check_all::<f16>(table().step_by(3));
}

#[test]
fn random_bf16() {
    check_all::<bf16>(random());
}

#[test]
fn random_f16() {
    check_all::<f16>(random());
}
