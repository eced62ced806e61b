//! `longspan.Layout`: a pattern compiled to blocks.

use std::hash::{DefaultHasher, Hash, Hasher};

use longspan::{Layout as Compiled, Layouts};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::picture;

/// A pattern compiled for given lengths: which blocks of queries and keys are seen in full, in part
/// or not at all. Made by `Pattern.compile`.
///
/// A layout is for every batch entry and head, or for so many of each (`batch`, `heads`).
///
/// >>> import longspan
/// >>> layout = longspan.Pattern("causal & window(64, 0)").compile(1000)
/// >>> layout
/// <longspan.Layout of 1000 × 1000 tokens, blocks of 64, 6.3 % of all pairs>
/// >>> layout.rows, layout.columns, layout.active_blocks
/// (16, 16, 31)
#[pyclass(frozen, module = "longspan")]
pub(crate) struct Layout {
    pub(crate) layouts: Layouts,
}

impl Layout {
    pub(crate) fn new(layouts: Layouts) -> Self {
        Layout { layouts }
    }

    /// The layout of each batch entry and head, one after the other; the only one where there is
    /// one.
    fn each(&self) -> Vec<&Compiled> {
        match &self.layouts {
            Layouts::One(layout) => vec![layout],
            Layouts::Each(set) => {
                let pairs = (0..set.batch()).flat_map(|b| (0..set.heads()).map(move |h| (b, h)));
                pairs.map(|(entry, head)| set.get(entry, head)).collect()
            }
        }
    }

    /// All that differ.
    fn distinct(&self) -> Vec<&Compiled> {
        match &self.layouts {
            Layouts::One(layout) => vec![layout],
            Layouts::Each(set) => set.layouts().iter().map(|layout| &**layout).collect(),
        }
    }

    /// One of them; they agree on tokens and blocks. Nothing of a set without entries or heads.
    fn first(&self) -> Option<&Compiled> {
        self.distinct().into_iter().next()
    }

    fn sum(&self, number: impl Fn(&Compiled) -> u128) -> u128 {
        self.each().into_iter().map(number).sum()
    }
}

#[pymethods]
impl Layout {
    /// Queries.
    #[getter]
    fn tokens_q(&self) -> u64 {
        self.first().map_or(0, Compiled::queries)
    }

    /// Keys.
    #[getter]
    fn tokens_k(&self) -> u64 {
        self.first().map_or(0, Compiled::keys)
    }

    /// Tokens a block.
    #[getter]
    fn block(&self) -> usize {
        self.first().map_or(0, |layout| layout.block().get())
    }

    /// Rows of query blocks.
    #[getter]
    fn rows(&self) -> usize {
        self.first().map_or(0, |layout| layout.rows().len())
    }

    /// Columns of key blocks.
    #[getter]
    fn columns(&self) -> u32 {
        self.first().map_or(0, Compiled::columns)
    }

    /// Batch entries it is for; `None` where it is for any.
    #[getter]
    fn batch(&self) -> Option<usize> {
        match &self.layouts {
            Layouts::One(_) => None,
            Layouts::Each(set) => Some(set.batch()),
        }
    }

    /// Query heads it is for; `None` where it is for any.
    #[getter]
    fn heads(&self) -> Option<usize> {
        match &self.layouts {
            Layouts::One(_) => None,
            Layouts::Each(set) => Some(set.heads()),
        }
    }

    /// The share of all pairs of a query and a key that is seen, over all batch entries and heads.
    #[getter]
    fn density(&self, py: Python<'_>) -> f64 {
        py.detach(|| {
            let each = self.each();
            let sum: f64 = each.iter().map(|layout| layout.density()).sum();
            if each.is_empty() { 0.0 } else { sum / each.len() as f64 }
        })
    }

    /// Blocks of which anything is seen, over all batch entries and heads.
    #[getter]
    fn active_blocks(&self, py: Python<'_>) -> u128 {
        py.detach(|| self.sum(|layout| layout.counts().active_blocks()))
    }

    /// Pairs of a query and a key that are seen, over all batch entries and heads.
    #[getter]
    fn active_pairs(&self, py: Python<'_>) -> u128 {
        py.detach(|| self.sum(|layout| layout.counts().active_pairs))
    }

    /// Bytes that the distinct layouts hold at present.
    #[getter]
    fn nbytes(&self) -> usize {
        self.distinct().iter().map(|layout| layout.bytes()).sum()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> Py<PyAny> {
        let py = other.py();
        let Ok(other) = other.cast::<Layout>() else { return py.NotImplemented() };
        let other = other.get();
        let equal = py.detach(|| {
            (self.batch(), self.heads()) == (other.batch(), other.heads())
                && self.tokens() == other.tokens()
                && self.each() == other.each()
        });
        PyBool::new(py, equal).to_owned().into_any().unbind()
    }

    fn __hash__(&self, py: Python<'_>) -> u64 {
        py.detach(|| {
            let mut hasher = DefaultHasher::new();
            self.tokens().hash(&mut hasher);
            self.each().iter().for_each(|layout| layout.hash().to_string().hash(&mut hasher));
            hasher.finish()
        })
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let (q, k) = (self.tokens_q(), self.tokens_k());
        let each = match &self.layouts {
            Layouts::One(_) => String::new(),
            Layouts::Each(set) => {
                format!(", {} batch entries × {} heads", set.batch(), set.heads())
            }
        };
        format!(
            "<longspan.Layout of {q} × {k} tokens, blocks of {}, {:.1} % of all pairs{each}>",
            self.block(),
            100.0 * self.density(py)
        )
    }

    fn __str__(&self, py: Python<'_>) -> String {
        let summary = self.__repr__(py);
        let picture = self.first().map(|layout| py.detach(|| picture::text(layout)));
        format!("{summary}\n{}", picture.unwrap_or_default())
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    /// What a notebook shows: full blocks dark, partial ones light; a cell is a block, or many.
    fn _repr_svg_(&self, py: Python<'_>) -> String {
        py.detach(|| picture::svg(&self.distinct()))
    }
}

impl Layout {
    fn tokens(&self) -> (u64, u64, usize) {
        (self.tokens_q(), self.tokens_k(), self.block())
    }
}
