//! Score additions, sinks and dropout of a call around a ring.

use std::sync::Arc;

use longspan::{Dropout, Score};
use longspan_ring::Transport;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::call::OptionGradients;
use crate::options::Options;

/// What differs from call to call of one ring.
pub(crate) struct Additions {
    score: Score,
    dropout: Option<Dropout>,
    sink_logits: Option<Arc<[f32]>>,
    /// Elements of the gradients of options.
    lens: [Option<usize>; 3],
}

impl Additions {
    pub(crate) fn read(options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let options = Options::read("ring_attention", options)?;
        Ok(Additions {
            score: options.score()?,
            dropout: options.dropout()?,
            sink_logits: options.sink_logits().map(Into::into),
            lens: options.gradient_lens(),
        })
    }

    /// Room for the gradients of options that there are, if they are wanted.
    pub(crate) fn gradients(&self, wanted: [bool; 3]) -> OptionGradients {
        std::array::from_fn(|n| self.lens[n].filter(|_| wanted[n]).map(|len| vec![0.0; len]))
    }

    pub(crate) fn set<T: Transport>(
        self,
        ring: &mut longspan_ring::Ring<T>,
    ) -> longspan_ring::Result<()> {
        ring.set_score(self.score, self.dropout)?;
        ring.set_sink_logits(self.sink_logits)
    }
}

/// Lists of f32 in bytes.
pub(crate) fn bytes(py: Python<'_>, lists: OptionGradients) -> [Option<Py<PyBytes>>; 3] {
    lists.map(|list| {
        let bytes = |list: Vec<f32>| list.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<u8>>();
        list.map(|list| PyBytes::new(py, &bytes(list)).unbind())
    })
}
