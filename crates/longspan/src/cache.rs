//! Keys and values of earlier tokens, for the queries of later ones.

mod slots;

use std::any::Any;
use std::sync::Arc;

use longspan_pattern::{Heads, Layout, LayoutSet, Padding, Pattern};

use self::slots::Slots;
use crate::arguments::{Inputs, Output, OutputMut};
use crate::attention::Attention;
use crate::check;
use crate::dims::Dims;
use crate::dtype::{Element, ElementType};
use crate::error::{Error, Result};
use crate::exec::Hook;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::tensor::View;

/// Keys and values of the tokens so far, and attention of the next ones over them.
///
/// A [`step`](Self::step) appends keys and values and attends with the queries of the same tokens: one
/// token per step decodes, many are a chunk of a prompt. Any chunking has the result of one call over
/// all tokens, where the pattern is causal.
///
/// ```
/// use longspan::{Attention, Dims, Inputs, KvCache, Layout, Order, Pattern, Shape, Tensor};
///
/// let pattern: Pattern = "causal & (window(16, 0) | sinks(4))".parse()?;
/// let dims = Dims { batch: 1, tokens: 100, heads: 2, dim: 8 };
/// let data = (0..dims.elements().unwrap()).map(|i| (i as f32).sin()).collect();
/// let x = Tensor::new(data, dims, Order::Bhsd)?;
///
/// let mut cache = KvCache::new(pattern.clone());
/// let part = |first, end| {
///     let view = x.view().tokens(first..end);
///     Inputs::new(view, view, view)
/// };
/// cache.step(part(0, 60))?;
/// for token in 60..99 {
///     cache.step(part(token, token + 1))?;
/// }
/// let last = cache.step(part(99, 100))?;
///
/// let layout = Layout::compile(&pattern, &Shape::new(100, 100))?;
/// let whole = Attention::new(layout).forward(part(0, 100))?;
/// let (a, b) = (last.out.view().get(0, 0, 1, 5), whole.out.view().get(0, 99, 1, 5));
/// assert!((a.unwrap() - b.unwrap()).abs() < 1e-6);
/// # Ok::<_, longspan::Error>(())
/// ```
///
/// Batch, heads, head dims and the element type are those of the first keys and values.
///
/// # Memory
///
/// A pattern that has a bounded [reach](longspan_pattern::Pattern::reach), such as a window with sinks,
/// bounds the cache: what no later query can attend to is overwritten. It then has slots for the
/// reach, for the largest step and for a quarter of the reach besides (at least 64 tokens), over any
/// number of steps. Without a bound it doubles when it is full.
///
/// All batch entries have the same number of slots. Paged caches, whose entries share a pool of
/// pages, are out of scope: their tables of pages belong to the server that schedules requests.
#[derive(Debug)]
pub struct KvCache {
    patterns: Heads,
    options: Options,
    capacity: usize,
    /// From the first keys and values on.
    held: Option<Box<dyn Held>>,
}

/// [`Slots`] of any element type.
trait Held: Any + std::fmt::Debug + Send + Sync {
    fn batch(&self) -> usize;
    fn len(&self, entry: usize) -> usize;
    fn slots(&self) -> usize;
    fn bytes(&self) -> usize;
    fn clear(&mut self, entry: usize);
    fn element(&self) -> ElementType;
}

impl KvCache {
    /// An empty cache. The patterns are those of the query heads.
    pub fn new(patterns: impl Into<Heads>) -> Self {
        let patterns = patterns.into();
        KvCache { patterns, options: Options::default(), capacity: 0, held: None }
    }

    /// Slots for this number of tokens are taken with the first ones.
    #[must_use]
    pub fn capacity(mut self, tokens: usize) -> Self {
        self.capacity = tokens;
        self
    }

    /// Options of the steps.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// The patterns of the query heads.
    pub fn patterns(&self) -> &Heads {
        &self.patterns
    }

    /// Batch entries; 0 before the first keys.
    pub fn batch(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.batch())
    }

    /// Tokens of a batch entry so far.
    ///
    /// # Panics
    ///
    /// If there is no such entry.
    pub fn len(&self, entry: usize) -> usize {
        self.held.as_ref().expect("an entry of a cache").len(entry)
    }

    /// Whether no batch entry has a token.
    pub fn is_empty(&self) -> bool {
        (0..self.batch()).all(|entry| self.len(entry) == 0)
    }

    /// Tokens that each batch entry has room for.
    pub fn slots(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.slots())
    }

    /// Bytes of keys and values.
    pub fn bytes(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.bytes())
    }

    /// Forgets the tokens of a batch entry, for another sequence in its place.
    ///
    /// # Panics
    ///
    /// If there is no such entry.
    pub fn clear(&mut self, entry: usize) {
        self.held.as_mut().expect("an entry of a cache").clear(entry);
    }

    /// Appends keys and values to all sequences; no query attends yet.
    pub fn append<E: Element>(&mut self, k: View<'_, E>, v: View<'_, E>) -> Result<()> {
        self.unless_refused(|cache| cache.slots_for(&k, &v)?.push(&k, &v, None))
    }

    /// Appends keys and values, of batch entry `b` the first `lengths[b]` tokens.
    pub fn append_ragged<E: Element>(
        &mut self,
        k: View<'_, E>,
        v: View<'_, E>,
        lengths: &[usize],
    ) -> Result<()> {
        self.unless_refused(|cache| cache.slots_for(&k, &v)?.push(&k, &v, Some(lengths)))
    }

    /// Appends keys and values, and attends with the queries of the same tokens.
    pub fn step<E: Element>(&mut self, inputs: Inputs<'_, E>) -> Result<Output<E>> {
        self.step_any(inputs, None)
    }

    /// A step of which batch entry `b` has the first `lengths[b]` tokens. The other queries have output
    /// 0 and log-sum-exp −∞.
    pub fn step_ragged<E: Element>(
        &mut self,
        inputs: Inputs<'_, E>,
        lengths: &[usize],
    ) -> Result<Output<E>> {
        self.step_any(inputs, Some(lengths))
    }

    fn step_any<E: Element>(
        &mut self,
        inputs: Inputs<'_, E>,
        lengths: Option<&[usize]>,
    ) -> Result<Output<E>> {
        let dims = Dims { dim: inputs.v.dims().dim, ..inputs.q.dims() };
        let mut output = Output::zeros(dims, inputs.q.order())?;
        self.step_into(inputs, lengths, output.as_mut(), Hook::none())?;
        Ok(output)
    }

    /// A step, written where `output` says. After an error the cache is what it was before.
    pub fn step_into<E: Element>(
        &mut self,
        inputs: Inputs<'_, E>,
        lengths: Option<&[usize]>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        self.unless_refused(|cache| cache.push_and_attend(inputs, lengths, output, hook))
    }

    /// What is refused does not decide about sizes and elements.
    fn unless_refused(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let first = self.held.is_none();
        let result = work(self);
        if result.is_err() && first {
            self.held = None;
        }
        result
    }

    fn push_and_attend<E: Element>(
        &mut self,
        inputs: Inputs<'_, E>,
        lengths: Option<&[usize]>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let Inputs { q, k, v } = inputs;
        let (tokens, heads) = (k.dims().tokens, q.dims().heads);
        self.slots_for(&k, &v)?.check(&k, &v, lengths)?;
        check::axis("q", "tokens", q.dims().tokens, tokens, "as k")?;
        check::tensors(&self.options, &inputs)?;
        check::output(&inputs, &output)?;
        let slots = self.slots_for(&k, &v)?;
        let before = slots.lens();
        slots.push(&k, &v, lengths)?;
        let attend = || {
            let slots = self.typed::<E>()?;
            let layouts = layouts(&self.patterns, slots, heads, tokens, lengths)?;
            let attention = Attention::new(layouts).options(self.options.clone());
            attention.forward_into(slots.beside(q), output, hook)
        };
        let result = attend();
        if result.is_err() {
            self.slots_for(&k, &v)?.take_back(&before);
        }
        result
    }

    /// Queries beside all keys and values, for attention of another kind: [`Dilated`](crate::Dilated)
    /// attends with the queries of the last tokens.
    ///
    /// Batch entries of different lengths, and keys that were overwritten, are errors.
    ///
    /// ```
    /// use longspan::{Dilated, Dims, KvCache, Order, Pattern, Tensor};
    ///
    /// let dilated = Dilated::new([(16, 1), (64, 4)])?.within(Pattern::causal());
    /// let dims = Dims { batch: 1, tokens: 1, heads: 2, dim: 8 };
    /// let mut cache = KvCache::new(Pattern::causal());
    /// for token in 0..100 {
    ///     let x = Tensor::filled(token as f32 / 100.0, dims, Order::Bhsd)?;
    ///     cache.append(x.view(), x.view())?;
    ///     let output = dilated.forward(cache.inputs(x.view())?)?;
    ///     assert!(output.out.as_slice()[0] <= token as f32 / 100.0);
    /// }
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn inputs<'a, E: Element>(&'a self, q: View<'a, E>) -> Result<Inputs<'a, E>> {
        let slots = self.typed::<E>()?;
        if !slots.is_whole() {
            let (what, why) = (
                "a cache with entries of different lengths or overwritten keys",
                "a tensor has all keys of all entries; use step, or a cache whose pattern is causal",
            );
            return Err(Error::Unexpected { what, why });
        }
        Ok(slots.beside(q))
    }

    /// The slots of an element type.
    fn typed<E: Element>(&self) -> Result<&Slots<E>> {
        let Some(held) = &self.held else { return Err(Error::EmptyCache) };
        let (holds, got) = (held.element(), E::TYPE);
        let other = || Error::CacheElement { holds: holds.to_string(), got: got.to_string() };
        (&**held as &dyn Any).downcast_ref().ok_or_else(other)
    }

    /// The slots for keys and values like these, which are made if there are none.
    fn slots_for<E: Element>(&mut self, k: &View<'_, E>, v: &View<'_, E>) -> Result<&mut Slots<E>> {
        if self.held.is_none() {
            let (dims, reach) = (k.dims(), self.patterns.reach());
            check::heads(dims)?;
            if let Some(entries) = self.patterns.entries() {
                check::axis("k", "batch", dims.batch, entries, "as the patterns")?;
            }
            let mut slots = Slots::<E>::new(dims, v.dims().dim, reach);
            slots.reserve(self.capacity)?;
            self.held = Some(Box::new(slots));
        }
        self.typed::<E>()?;
        let held: &mut dyn Any = &mut **self.held.as_mut().expect("made above");
        Ok(held.downcast_mut().expect("of that type"))
    }
}

/// The layouts of the last `queries` tokens, of which entry `b` has the first `lengths[b]`.
fn layouts<E: Element>(
    patterns: &Heads,
    slots: &Slots<E>,
    heads: usize,
    queries: usize,
    lengths: Option<&[usize]>,
) -> Result<Layouts> {
    let (span, entries) = (slots.span(), slots.entries());
    if let (Heads::Same(pattern), None, [entry, others @ ..]) = (patterns, lengths, entries)
        && others.iter().all(|other| other == entry)
    {
        let shape = slots.shape(*entry, queries, queries, span)?;
        return Ok(Layout::compile(pattern, &shape)?.into());
    }
    let mut layouts: Vec<Arc<Layout>> = Vec::with_capacity(entries.len() * heads);
    for (index, &entry) in entries.iter().enumerate() {
        let own = lengths.map_or(queries, |lengths| lengths[index]);
        let shape = slots.shape(entry, queries, own, span)?;
        // Neither slots of other entries' tokens nor queries of their tokens are there.
        let whole = slots.used(entry) == span && own == queries;
        let present = if whole { None } else { Some(present(entry.len)?) };
        let own = restricted(patterns.entry(index), heads, present)?;
        let set = LayoutSet::compile(&own, heads, &shape, &Padding::None(1), None)?;
        layouts.extend((0..heads).map(|head| set.layouts()[set.index(0, head)].clone()));
    }
    Ok(LayoutSet::new(entries.len(), heads, layouts)?.into())
}

/// Queries and keys at the first positions, as many as there are tokens.
fn present(tokens: usize) -> Result<Pattern> {
    let tokens = tokens as u64;
    Ok(Pattern::keys(0, tokens)? & Pattern::queries(0, tokens)?)
}

/// Patterns of `heads` query heads, cut with another one if there is one.
fn restricted(patterns: &Heads, heads: usize, to: Option<Pattern>) -> Result<Heads> {
    let Some(to) = to else { return Ok(patterns.clone()) };
    if let Heads::Same(pattern) = patterns {
        return Ok((pattern.clone() & to).into());
    }
    let each = (0..heads).map(|head| Ok(patterns.get(head, heads)?.clone() & to.clone()));
    Ok(Heads::each(each.collect::<Result<Vec<_>>>()?)?)
}
