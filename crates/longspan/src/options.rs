//! Options of calls.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::exec::{Executor, Pool, Threads, Workers};
use crate::isa::Isa;
use crate::precision::Precision;
use crate::score::{BiasTable, Dropout, Score};
use crate::workspace::Workspaces;

/// Options of a call: one set for attention of every kind and every front end.
///
/// Clones share workspaces, so attentions with clones of the same options keep the memory of the
/// largest call, not one copy each.
///
/// ```
/// use longspan::{Attention, Dilated, Layout, Options, Pattern, Shape};
///
/// let options = Options::default().scale(0.1).softcap(50.0).threads(2);
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(100, 100))?;
/// let attention = Attention::new(layout).options(options.clone());
/// let dilated = Dilated::new([(64, 1), (256, 4)])?.options(options);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Options {
    pub(crate) scale: Option<f32>,
    pub(crate) score: Score,
    pub(crate) dropout: Option<Dropout>,
    /// One per query head.
    pub(crate) sink_logits: Option<Arc<[f32]>>,
    pub(crate) threads: Threads,
    /// The default pool if `None`.
    pub(crate) executor: Option<Arc<dyn Executor>>,
    pub(crate) isa: Option<Isa>,
    pub(crate) precision: Precision,
    /// Whether layouts are split into components; by their cost if `None`.
    pub(crate) split: Option<bool>,
    /// Whether the bits of a row must not depend on which other rows a call has.
    pub(crate) uniform: bool,
    pub(crate) workspaces: Arc<Workspaces>,
}

/// Declares the setters of [`Options`], and with a field those of a type that holds them.
macro_rules! setters {
    ($($field:ident)?) => {
        /// The factor of scores; `1/√dim` by default.
        #[must_use]
        pub fn scale(mut self, scale: f32) -> Self {
            self$(.$field)?.scale = Some(scale);
            self
        }

        /// What is done to scores before the softmax.
        #[must_use]
        pub fn score(mut self, score: $crate::Score) -> Self {
            self$(.$field)?.score = score;
            self
        }

        /// [`Score::softcap`]($crate::Score::softcap).
        #[must_use]
        pub fn softcap(mut self, cap: f32) -> Self {
            self$(.$field)?.score.softcap = Some(cap);
            self
        }

        /// [`Score::alibi_slopes`]($crate::Score::alibi_slopes).
        #[must_use]
        pub fn alibi_slopes(mut self, slopes: impl Into<std::sync::Arc<[f32]>>) -> Self {
            self$(.$field)?.score.alibi_slopes = Some(slopes.into());
            self
        }

        /// [`Score::bias_table`]($crate::Score::bias_table).
        #[must_use]
        pub fn bias_table(mut self, table: $crate::BiasTable) -> Self {
            self$(.$field)?.score.bias_table = Some(table);
            self
        }

        /// Dropout of probabilities; none by default.
        #[must_use]
        pub fn dropout(mut self, dropout: impl Into<Option<$crate::Dropout>>) -> Self {
            self$(.$field)?.dropout = dropout.into();
            self
        }

        /// Sink logits, one per query head: a learned logit that joins the denominator of each
        /// row of its head once, with value 0 (gpt-oss).
        ///
        /// With `z` the sum of exponentials of a row's scores and `s` the logit of its head, the
        /// output is multiplied by `z / (z + exp s)` and the log-sum-exp is `ln (z + exp s)`. A
        /// query that sees no key has output 0 and log-sum-exp `s`. Logits are finite; −∞ is a head
        /// without a sink. The scale and the [score](Self::score) transform do not apply to them.
        ///
        /// A partial softmax ([`State`]($crate::State)) has no sink: rows get it when they are
        /// finished, so that it counts once however many tiles, branches or ranks their keys are
        /// spread over. Gradients: [`Gradients::dsink_logits`]($crate::Gradients::dsink_logits).
        #[must_use]
        pub fn sink_logits(mut self, logits: impl Into<std::sync::Arc<[f32]>>) -> Self {
            self$(.$field)?.sink_logits = Some(logits.into());
            self
        }

        /// The number of threads of a call. Results do not depend on it.
        #[must_use]
        pub fn threads(mut self, threads: impl Into<$crate::Threads>) -> Self {
            self$(.$field)?.threads = threads.into();
            self
        }

        /// The threads that calls run on, in place of those of the default
        /// [`Pool`]($crate::Pool::global). Results do not depend on them.
        #[must_use]
        pub fn executor(mut self, executor: std::sync::Arc<dyn $crate::Executor>) -> Self {
            self$(.$field)?.executor = Some(executor);
            self
        }

        /// The instruction set, in place of the fastest one. Calls fail where the CPU does not have
        /// it.
        #[must_use]
        pub fn isa(mut self, isa: $crate::Isa) -> Self {
            self$(.$field)?.isa = Some(isa);
            self
        }

        /// The precision of products, where there is a choice.
        #[must_use]
        pub fn precision(mut self, precision: $crate::Precision) -> Self {
            self$(.$field)?.precision = precision;
            self
        }

        $(
            /// All options at once.
            #[must_use]
            pub fn options(mut self, options: $crate::Options) -> Self {
                self.$field = options;
                self
            }

            /// Returns to the system what calls keep for the next one: their workspaces, and the
            /// idle threads of the executor. The next call allocates and starts them again.
            pub fn trim(&self) {
                self.$field.trim();
            }

            /// What is stored, multiplied and accumulated in calls on tensors of `E`, on this CPU.
            pub fn compute_types<E: $crate::Element>(&self) -> $crate::Result<$crate::ComputeTypes> {
                let isa = $crate::Isa::choose(self.$field.isa)?;
                Ok(self.$field.precision.compute_types(E::TYPE, isa))
            }
        )?
    };
}

pub(crate) use setters;

impl Options {
    setters!();

    /// [`Attention::split`](crate::Attention::split). Only [`Attention`](crate::Attention) has a choice.
    #[must_use]
    pub fn split(mut self, split: impl Into<Option<bool>>) -> Self {
        self.split = split.into();
        self
    }

    /// Refuses a scale, a score transform or sink logits that are not valid for this number of query
    /// heads. Calls of this library check that themselves.
    ///
    /// ```
    /// let options = longspan::Options::default().sink_logits([0.5, -1.0]);
    /// assert!(options.check(2).is_ok());
    /// let error = options.check(4).unwrap_err();
    /// assert_eq!(error.to_string(), "sink_logits has 2 elements, expected 4");
    /// ```
    pub fn check(&self, heads: usize) -> Result<()> {
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            return Err(Error::Number { what: "the scale", value: scale, rule: "a finite number" });
        }
        self.score.check(heads)?;
        self.check_sink_logits(heads)
    }

    /// Whether any option differs from the default.
    pub(crate) fn any_set(&self) -> bool {
        let Options {
            scale,
            score,
            dropout,
            sink_logits,
            threads,
            executor,
            isa,
            precision,
            split,
            ..
        } = self;
        let of_scores = scale.is_some() || *score != Score::default() || dropout.is_some();
        let of_calls = executor.is_some() || isa.is_some() || *precision != Precision::default();
        let of_calls = of_calls || split.is_some();
        of_scores || of_calls || sink_logits.is_some() || *threads != Threads::default()
    }

    /// Elements of the sink logits, the bias table and the slopes, where there are any.
    pub(crate) fn gradient_lens(&self) -> [Option<usize>; 3] {
        let Score { alibi_slopes, bias_table, .. } = &self.score;
        let len = |list: &Option<Arc<[f32]>>| list.as_ref().map(|list| list.len());
        [len(&self.sink_logits), bias_table.as_ref().map(BiasTable::values), len(alibi_slopes)]
    }

    /// Whether there is one valid sink logit per query head, if there are any.
    pub(crate) fn check_sink_logits(&self, heads: usize) -> Result<()> {
        let Some(logits) = self.sink_logits.as_deref() else { return Ok(()) };
        if logits.len() != heads {
            return Err(Error::Length { what: "sink_logits", len: logits.len(), expected: heads });
        }
        match logits.iter().find(|logit| logit.is_nan() || **logit == f32::INFINITY) {
            Some(&value) => Err(Error::Number {
                what: "a sink logit",
                value,
                rule: "a finite number, or −∞ for a head without a sink",
            }),
            None => Ok(()),
        }
    }

    fn current_executor(&self) -> &dyn Executor {
        self.executor.as_deref().unwrap_or(Pool::global())
    }

    /// The threads that calls run on.
    pub(crate) fn workers(&self) -> Result<Workers<'_>> {
        let threads = match (&self.executor, self.threads) {
            (Some(executor), Threads::Auto) => executor.threads().max(1),
            (_, threads) => threads.count()?,
        };
        Ok(Workers { executor: self.current_executor(), threads })
    }

    /// Frees workspaces, and ends idle threads.
    pub(crate) fn trim(&self) {
        self.workspaces.trim();
        self.current_executor().trim();
    }
}
