//! Validation of a pass's arguments. `ring` calls it before a pass starts.

use longspan::{Dims, Element, Inputs, View};

use crate::error::{Error, Result};
use crate::problem::Problem;
use crate::wire::Wire;

/// Checks a rank's inputs against its problem.
pub(crate) fn check_inputs<E: Element>(
    problem: &Problem,
    rank: usize,
    inputs: &Inputs<'_, E>,
) -> Result<()> {
    let tokens = problem.shards.rank(rank).len();
    if E::TYPE != problem.element {
        let (got, expected) = (E::TYPE, problem.element);
        return Err(Error::Elements { got, expected });
    }
    check_dims("q", inputs.q.dims(), problem.query_dims(tokens))?;
    check_dims("k", inputs.k.dims(), problem.key_dims(tokens))?;
    check_dims("v", inputs.v.dims(), problem.value_dims(tokens))?;
    for (tensor, view) in [("k", &inputs.k), ("v", &inputs.v)] {
        if problem.wire == Wire::Int8 && !is_finite(view) {
            return Err(Error::NotFinite { tensor });
        }
    }
    Ok(())
}

/// Checks a tensor's dims axis by axis.
pub(crate) fn check_dims(tensor: &'static str, got: Dims, expected: Dims) -> Result<()> {
    let axes = [
        ("batch entries", got.batch, expected.batch, "as in the ring's problem"),
        ("tokens", got.tokens, expected.tokens, "as in the rank's shard"),
        ("heads", got.heads, expected.heads, "as in the ring's problem"),
        ("elements per head", got.dim, expected.dim, "as in the ring's problem"),
    ];
    for (axis, got, expected, why) in axes {
        if got != expected {
            return Err(Error::Shape { tensor, axis, got, expected, why });
        }
    }
    Ok(())
}

fn is_finite<E: Element>(view: &View<'_, E>) -> bool {
    let dims = view.dims();
    let mut row = vec![E::default(); dims.dim];
    (0..dims.batch * dims.heads * dims.tokens).all(|index| {
        let (head, token) = (index / dims.tokens, index % dims.tokens);
        view.copy_row(head / dims.heads, token, head % dims.heads, &mut row);
        row.iter().all(|x| x.to_f32().is_finite())
    })
}
