//! LongNet's dilated attention: branches of segments and rates, joined by their denominators.

mod branch;
mod bytes;
mod demand;
mod parts;
mod sequences;

pub use self::branch::{Branch, Overlap};
pub use self::demand::DilatedWork;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use longspan_pattern::{BlockSize, Pattern, Positions};

use self::parts::{CompiledLayouts, Maker};
use self::sequences::{Sequence, Sequences};
use crate::arguments::{
    Gradients, GradientsMut, Inputs, Output, OutputGradient, OutputMut, OutputRef,
};
use crate::check;
use crate::components::{self, Component, Components, HeadMap, Kept, List};
use crate::dims::{Dims, Sizes};
use crate::driver::gradients;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor};
use crate::options::{Options, setters};
use crate::softmax::RowStatistics;

/// Dilated attention as LongNet defines it (arXiv 2307.02486).
///
/// Branch `b` cuts the sequence into segments of `w_b` tokens. In each, head `h` looks at the
/// tokens whose number within the segment is `h mod r_b` modulo the rate `r_b`, and only at them:
/// queries, keys and values (equations 3 to 8, offsets from 11 on). Over those a branch is plain
/// attention. A query's output is the mean of its branches' outputs, weighted by their softmax
/// denominators (equations 9 and 10):
///
/// ```text
/// out_i = Σ_b α_b(i) out_b(i)      α_b(i) = s_b(i) / Σ_c s_c(i)      s_b(i) = Σ_{j ∈ A_b(i)} exp(score_ij)
/// ```
///
/// That is the softmax over all of a query's branches together, in which a key that two branches
/// see counts twice ([`Overlap`]). It is computed as such: each branch goes on from the partial
/// softmax of those before it, and gradients go through the weights.
///
/// A [sink logit](Dilated::sink_logits) joins the denominator of a row once, not once per branch.
///
/// Any length will do; last segments are short, and rates needn't divide segments. A query that no
/// branch has (possible where no rate is 1) has output 0 and log-sum-exp −∞. Sequences of several
/// lengths are one call: [padded](Dilated::padded) or [packed](Dilated::packed_cu_seqlens).
///
/// Nothing is gathered or copied: a branch reads and writes the tensors through views with a step.
///
/// ```
/// use longspan::{Dilated, Dims, Inputs, Order, Pattern, Tensor};
///
/// let dilated = Dilated::new([(512, 1), (1_024, 2), (2_048, 4)])?.within(Pattern::causal());
///
/// let dims = Dims { batch: 1, tokens: 3_001, heads: 4, dim: 16 };
/// let data: Vec<f32> = (0..dims.elements().unwrap()).map(|i| (i as f32).sin()).collect();
/// let x = Tensor::new(data, dims, Order::Bshd)?;
/// let output = dilated.forward(Inputs::new(x.view(), x.view(), x.view()))?;
/// // The first query attends to its own key alone, though in two branches of head 0.
/// let (out, value) = (output.out.view().get(0, 0, 0, 5), x.view().get(0, 0, 0, 5));
/// assert!((out.unwrap() - value.unwrap()).abs() <= f32::EPSILON);
/// # Ok::<_, longspan::Error>(())
/// ```
///
/// A clone shares layouts and scratch with what it is a clone of.
#[derive(Debug, Clone)]
pub struct Dilated {
    branches: Vec<Branch>,
    within: Pattern,
    also: Option<Pattern>,
    overlap: Overlap,
    query_offset: Option<i64>,
    block: Option<BlockSize>,
    sequences: Sequences,
    pub(crate) options: Options,
    kept: Kept<Key>,
}

/// Branches, and what they are cut with and combined by; options are not printed.
///
/// ```
/// use longspan::{Dilated, Pattern};
///
/// let dilated = Dilated::new([(512, 1), (2_048, 4)])?.within(Pattern::causal());
/// assert_eq!(dilated.to_string(), "branches (512, 1), (2048, 4) within causal, overlap weighted");
/// # Ok::<_, longspan::Error>(())
/// ```
impl fmt::Display for Dilated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("branches ")?;
        for (index, branch) in self.branches.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}({}, {})", branch.segment(), branch.rate())?;
        }
        write!(f, " within {}", self.within)?;
        if let Some(also) = &self.also {
            write!(f, ", also {also}")?;
        }
        f.write_str(match self.overlap {
            Overlap::Weighted => ", overlap weighted",
            Overlap::Union => ", overlap union",
        })?;
        self.sequences.fmt(f)
    }
}

/// The position of the first query; queries, keys, query heads, key heads; what a sequence is.
type Key = (i64, [usize; 4], Sequences);

impl Dilated {
    /// These branches, at least one, as [`Branch`]es or as pairs of segment length and rate.
    pub fn new<B>(branches: impl IntoIterator<Item = B>) -> Result<Self>
    where
        B: TryInto<Branch>,
        Error: From<B::Error>,
    {
        let branches = branches.into_iter().map(TryInto::try_into);
        let branches: Vec<Branch> = branches.collect::<Result<_, _>>()?;
        if branches.is_empty() {
            return Err(Error::NoBranches);
        }
        Ok(Dilated {
            branches,
            within: Pattern::full(),
            also: None,
            overlap: Overlap::default(),
            query_offset: None,
            block: None,
            sequences: Sequences::default(),
            options: Options::default(),
            kept: Kept::default(),
        })
    }

    /// What every branch is cut with: `causal`, `documents(…)`, or any other pattern. It speaks of
    /// positions in the whole sequence.
    #[must_use]
    pub fn within(mut self, pattern: Pattern) -> Self {
        self.within = pattern;
        self.kept = Kept::default();
        self
    }

    /// What queries see besides their branches, such as a window: one more branch, over all tokens
    /// and the same for all heads, cut like the others. With [`Overlap::Union`] that is
    /// `also | dilated(w₁, r₁, o₁) | …`, at the cost of its parts.
    ///
    /// ```
    /// use longspan::{Dilated, Overlap, Pattern};
    ///
    /// let dilated = Dilated::new([(1_024, 2), (4_096, 8)])?
    ///     .within(Pattern::causal())
    ///     .also(Pattern::sliding_window(512)?)
    ///     .overlap(Overlap::Union);
    /// # let _ = dilated;
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn also(mut self, pattern: Pattern) -> Self {
        self.also = Some(pattern);
        self.kept = Kept::default();
        self
    }

    /// How branches that see the same key combine.
    #[must_use]
    pub fn overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = overlap;
        self.kept = Kept::default();
        self
    }

    /// The position of the first query, where it isn't that of the last ones: see
    /// [`Shape::query_offset`](crate::Shape::query_offset).
    #[must_use]
    pub fn query_offset(mut self, offset: i64) -> Self {
        self.query_offset = Some(offset);
        self
    }

    /// Tokens per block of the layouts of [`components`](Self::components) and of calls; 64 by default.
    #[must_use]
    pub fn block(mut self, block: BlockSize) -> Self {
        self.block = Some(block);
        self.kept = Kept::default();
        self
    }

    setters!(options);

    /// The branches.
    pub fn branches(&self) -> &[Branch] {
        &self.branches
    }

    /// Whether any option was set: scale, score, dropout, sinks, threads and so on, or the position
    /// of the first query. For callers that have options of their own.
    pub fn has_options(&self) -> bool {
        self.query_offset.is_some() || self.options.any_set()
    }

    /// What a query head attends to as a pattern, in which a key that several branches have counts
    /// once: that of [`Overlap::Union`], and the pairs of both. Packed sequences count, padding does not.
    ///
    /// ```
    /// use longspan::{Dilated, Pattern};
    ///
    /// let dilated = Dilated::new([(4, 1), (8, 2)])?.within(Pattern::causal());
    /// let expected: Pattern = "causal & (dilated(4, 1, 0) | dilated(8, 2, 1))".parse()?;
    /// assert_eq!(dilated.head_pattern(3)?, expected);
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn head_pattern(&self, head: usize) -> Result<Pattern> {
        let any = self.uncut(head)?.into_iter().reduce(|any, own| any | own);
        let any = any.expect("at least one branch");
        self.per_sequence(if self.within == Pattern::full() {
            any
        } else {
            self.within.clone() & any
        })
    }

    /// A pattern of each of packed sequences.
    fn per_sequence(&self, pattern: Pattern) -> Result<Pattern> {
        Ok(match &self.sequences {
            Sequences::Packed { queries, keys } => {
                Pattern::packed_cu_seqlens(queries, keys, pattern)?
            }
            _ => pattern,
        })
    }

    /// What a query head attends to, as patterns whose keys count once each: one per branch, and
    /// one for what queries see besides; with [`Overlap::Union`] one in all.
    pub fn branch_patterns(&self, head: usize) -> Result<Vec<Pattern>> {
        if self.overlap == Overlap::Union {
            return Ok(vec![self.head_pattern(head)?]);
        }
        let cut = |pattern| self.per_sequence(self.within.clone() & pattern);
        self.uncut(head)?.into_iter().map(cut).collect()
    }

    /// What queries see besides, and the branches of a head, before they are cut.
    fn uncut(&self, head: usize) -> Result<Vec<Pattern>> {
        let branch = |branch: &Branch| {
            Pattern::dilated(branch.segment(), branch.rate(), head as u64 % branch.rate())
        };
        let branches: Vec<_> = self.branches.iter().map(branch).collect::<Result<_, _>>()?;
        Ok(self.also.iter().cloned().chain(branches).collect())
    }

    /// Output and log-sum-exp; the latter is that of all branches together.
    pub fn forward<E: Element>(&self, inputs: Inputs<'_, E>) -> Result<Output<E>> {
        let dims = check::tensors(&self.options, &inputs)?.output();
        let mut output = Output::zeros(dims, inputs.q.order())?;
        self.forward_into(inputs, output.as_mut(), Hook::none())?;
        Ok(output)
    }

    /// Output and log-sum-exp, written where `output` says.
    pub fn forward_into<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let sizes = check::tensors(&self.options, &inputs)?;
        check::output(&inputs, &output)?;
        let monitor = Monitor::new(hook);
        let parts = self.parts(&sizes, &monitor)?;
        let OutputMut { out, lse, mut lse_lo } = output;
        let output = OutputMut { out, lse, lse_lo: lse_lo.as_deref_mut() };
        components::forward_into(&parts, &self.options, &inputs, output, &monitor)?;
        let axis = self.query_axis(&sizes);
        self.exclude(&Positions::range(axis.offset, axis.count)?, sizes.output(), lse, lse_lo)
    }

    /// Gradients with respect to queries, keys and values, through branches and their weights; see
    /// [`Attention::backward`](crate::Attention::backward).
    pub fn backward<'a, E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
    ) -> Result<Gradients<E>> {
        let mut gradients = gradients::zeros(&self.options, &inputs)?;
        let monitor = Monitor::new(Hook::none());
        self.differentiate(inputs, output.into(), gradient.into(), gradients.as_mut(), &monitor)?;
        Ok(gradients)
    }

    /// Gradients, written where `gradients` says.
    pub fn backward_into<'a, E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
        mut gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let sizes = check::tensors(&self.options, &inputs)?;
        let (output, gradient) = (output.into(), gradient.into());
        let read = check::backward(&output, &gradient, sizes.output())?;
        check::gradients(&inputs, &read, &gradients)?;
        check::option_gradients(&self.options, &gradients)?;
        let monitor = Monitor::new(hook);
        gradients::clear(&self.options, &mut gradients, &monitor)?;
        self.differentiate(inputs, output, gradient, gradients, &monitor)
    }

    /// Adds to f32 gradients that are zero; others are written.
    fn differentiate<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
        gradients: GradientsMut<'_, E>,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let sizes = check::tensors(&self.options, &inputs)?;
        let parts = self.parts(&sizes, monitor)?;
        let dims = sizes.output();
        let add = |rows: RowStatistics<'_>, gradients: GradientsMut<'_>| {
            let options = &self.options;
            components::accumulate(
                &parts,
                options,
                &inputs,
                gradient.dout,
                rows,
                gradients,
                monitor,
            )
        };
        gradients::differentiate(&self.options, dims, (output, gradient), gradients, monitor, add)
    }

    /// The components of some queries and keys of a sequence of `tokens` tokens: those at the given
    /// positions, in this order. Joined over all keys they are this attention; rows get no sinks.
    ///
    /// ```
    /// use longspan::{Dilated, HeadMap, Hook, Pattern, Positions};
    ///
    /// let dilated = Dilated::new([(4, 1), (8, 2)])?.within(Pattern::causal());
    /// let (early, late) = (Positions::range(0, 4)?, Positions::range(4, 4)?);
    /// let heads = HeadMap::all(2, 2);
    /// // Of the second branch: two queries of each head on two keys.
    /// let remote = dilated.components(8, &late, &early, &heads, Hook::none())?;
    /// assert_eq!(remote.active_pairs()?, 2 * 2 * 2);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn components(
        &self,
        tokens: usize,
        queries: &Positions,
        keys: &Positions,
        heads: &HeadMap,
        hook: Hook<'_>,
    ) -> Result<Components> {
        let monitor = Monitor::new(hook);
        let list = self.make(&self.sequences_of(tokens, queries, keys)?, heads, &monitor)?;
        let (lens, batch) = ((queries.len(), keys.len()), self.sequences.batch());
        Ok(Components::new(list, heads.clone(), lens, batch, self.options.clone()))
    }

    /// The components of all queries and keys of tensors of these dims: what
    /// [`forward`](Self::forward) computes.
    ///
    /// ```
    /// use longspan::{Dilated, Dims, Hook, Pattern};
    ///
    /// // Of each segment of 2,048 tokens, a head has every fourth.
    /// let dilated = Dilated::new([(2_048, 4)])?.within(Pattern::causal()).padded([0..4_096, 0..5_000]);
    /// let dims = Dims { batch: 2, tokens: 5_000, heads: 2, dim: 64 };
    /// let components = dilated.all_components(dims, dims, Hook::none())?;
    /// let first = components.calls().next().unwrap();
    /// let (segments, tokens) = (first.queries().segments, first.queries().tokens);
    /// assert_eq!((segments.count, segments.step), (2, 2_048));
    /// assert_eq!((tokens.count, tokens.step), (512, 4));
    /// assert_eq!((first.entry(), first.query_heads().count), (Some(0), 1));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn all_components(&self, q: Dims, k: Dims, hook: Hook<'_>) -> Result<Components> {
        check::query_and_key(q, k)?;
        let sizes = Sizes {
            batch: q.batch,
            queries: q.tokens,
            keys: k.tokens,
            heads: q.heads,
            key_heads: k.heads,
            dim: q.dim,
            value_dim: k.dim,
        };
        let list = self.parts(&sizes, &Monitor::new(hook))?.to_vec();
        let (heads, lens) = (HeadMap::all(q.heads, k.heads), (q.tokens, k.tokens));
        Ok(Components::new(list, heads, lens, Some(q.batch), self.options.clone()))
    }

    /// The calls of the kernels for given sizes.
    fn parts(&self, sizes: &Sizes, monitor: &Monitor<'_>) -> Result<Arc<List>> {
        let Sizes { batch, queries, keys, heads, key_heads, .. } = *sizes;
        self.sequences.check(batch, queries, keys)?;
        if matches!(self.sequences, Sequences::Packed { .. }) && self.query_offset.is_some() {
            let why = "packed sequences count their own positions";
            return Err(Error::Unexpected { what: "query_offset", why });
        }
        let axis = self.query_axis(sizes);
        let key = (axis.offset, [queries, keys, heads, key_heads], self.sequences.clone());
        self.kept.get_or_make(key, || {
            let positions = (Positions::range(axis.offset, queries)?, Positions::range(0, keys)?);
            let sequences = self.sequences.split(keys, axis, &positions.0, &positions.1);
            let list = self.make(&sequences, &HeadMap::all(heads, key_heads), monitor)?;
            Ok(List::new(list, sizes))
        })
    }

    fn make(
        &self,
        sequences: &[Sequence],
        heads: &HeadMap,
        monitor: &Monitor<'_>,
    ) -> Result<Vec<Component>> {
        let (compiled, mut components) = (RefCell::default(), Vec::new());
        for sequence in sequences {
            let maker = self.maker(sequence, heads, monitor, &compiled);
            maker.components(&mut components).map_err(|error| match error {
                Error::Pattern(longspan_pattern::Error::Stopped { .. }) => monitor.stopped_error(),
                other => other,
            })?;
        }
        Ok(components)
    }

    fn maker<'a, 'h>(
        &'a self,
        sequence: &'a Sequence,
        heads: &'a HeadMap,
        monitor: &'a Monitor<'h>,
        compiled: &'a RefCell<CompiledLayouts>,
    ) -> Maker<'a, 'h> {
        let Dilated { branches, within, overlap, .. } = self;
        let (also, overlap, block) = (self.also.as_ref(), *overlap, self.block);
        Maker { branches, within, also, overlap, block, sequence, heads, monitor, compiled }
    }
}
