//! The oracle that Longspan is tested against, and the cases it is tested with.
//!
//! A [`Rule`] is an attention pattern as the definition states it: one `bool` for one query and one
//! key, found by arithmetic a reader can check by eye. It shares no code with the pattern compiler,
//! and is slow on purpose; what has to be fast is compared with it at every pair.
//!
//! A [`Case`] is a rule together with everything a layout is compiled for: lengths, offsets, block
//! size, maps, padding. [`Case::from_seed`] makes the same one on every machine, the `Arbitrary`
//! implementation makes one from a fuzzer's bytes, and [`Case::truth`] says what is right.
//!
//! ```
//! use longspan_testing::{Case, Rule};
//!
//! let rule = Rule::And(vec![Rule::Causal, Rule::Window { left: 2, right: 2 }]);
//! assert_eq!(rule.to_string(), "causal & window(2, 2)");
//! assert!(rule.allows(10, 8) && !rule.allows(10, 11));
//!
//! let case = Case::from_seed(1);
//! let truth = case.truth();
//! assert_eq!(truth.queries(), case.query_positions().len());
//! ```
//!
//! A [`Problem`] is attention as the definition states it; [`truth`] is its answer, forward and
//! backward, in `f64`, and a [`Measure`] says how far another answer is from it. An
//! [`AttentionCase`] is a named or random problem over a case's mask.
//!
//! # Crate layout
//!
//! | file | what |
//! |---|---|
//! | `rule.rs`, `rule/` | the oracle, its text form, its tests by hand-made numbers |
//! | `splitmix.rs` | the one random generator: draws of `random`, bytes and numbers of a seed |
//! | `case.rs` | a case and its truth |
//! | `generate.rs`, `generate/` | random cases: lengths and offsets, rules, maps |
//! | `attention.rs`, `attention/` | the definition of attention in `f64` and in naive `f32`, formats of 16 bits, errors and their bounds, cases |
//! | `close.rs` | elements that have to be near each other, one by one |
//! | `longnet.rs` | the equations of LongNet's paper, branch by branch |

#![forbid(unsafe_code)]

mod attention;
mod case;
mod close;
mod generate;
mod longnet;
mod rule;
mod splitmix;

pub use attention::{
    Answer, AttentionCase, Axes, Measure, Noise, Precision, Problem, Sample, Seen, Sizes, Table,
    Transform, Values, attention_cases, naive, normals, truth,
};
pub use case::{Case, Steps, Truth};
pub use close::{assert_close, largest_difference};
pub use longnet::{LongNet, Span};
pub use rule::{Level, Rule, Sequences};
pub use splitmix::{Random, seeded_bytes};
