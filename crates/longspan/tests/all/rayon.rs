//! Calls on a rayon pool, from outside of it and from one of its own threads.

use std::sync::Arc;

use longspan::{Attention, Isa, Order};
use longspan_testing::{AttentionCase, Rule};

use crate::common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

#[test]
fn on_rayon_pool() {
    let rule = Rule::And(vec![Rule::Causal, Rule::Window { left: 300, right: 0 }]);
    let case = AttentionCase { heads_q: 4, ..AttentionCase::new("rayon", rule, 3000) };
    let tensors = Tensors::of(&case.unmasked(), PLACEMENT);
    let both =
        |attention: &Attention| Run { attention, tensors: &tensors, results: PLACEMENT }.both();
    let expected = both(&attention(&case, Isa::best(), 1));
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let observed = Arc::new(Observed::new(pool));
    let own = Attention::new(layouts(&case)).executor(observed.clone());
    assert_eq!(both(&own), expected);
    let calls = observed.take();
    assert!(calls.len() >= 2 && calls.iter().all(|call| *call == (3, 3)), "{calls:?}");
    assert_eq!(observed.inner.install(|| both(&own)), expected);
    let calls = observed.take();
    assert!(calls.len() >= 2 && calls.iter().all(|call| *call == (3, 3)), "{calls:?}");
}
